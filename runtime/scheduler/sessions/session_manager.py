"""Manages sessions and runs their instructions in order: open, append, fork, start a call, close."""

from __future__ import annotations

import secrets
import time
from collections import Counter

import msgspec

from plait.constrained import CompilePool, CompileQueueFull, Grammar, GrammarError, Reasoning, Structural
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, ProgramId
from plait.runtime.config import EngineConfig
from plait.runtime.errors import VALUE_DOES_NOT_FIT
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import (
    MAX_FORK_CHILDREN,
    MAX_NAME_CHARS,
    Abort,
    Append,
    ClientMessage,
    Close,
    Embed,
    Failed,
    Fork,
    Generate,
    Open,
    SessionCall,
    Welcome,
)
from plait.runtime.scheduler.error_log import ErrorLog
from plait.runtime.scheduler.output_processor import CompletionDoesNotFit, OutputProcessor
from plait.runtime.scheduler.policy.batching import BatchScheduler
from plait.runtime.scheduler.sequence_sampling.exact_sampling import ExactSampling
from plait.runtime.scheduler.sequence_sampling.particle_sampling import ParticleSampling
from plait.runtime.scheduler.sequence_sampling.prefix_requests import PrefixRequests
from plait.runtime.scheduler.sessions.calls import CallTracker, Send
from plait.runtime.scheduler.sessions.choice_scoring import make_selection
from plait.runtime.scheduler.sessions.healed_tokens import remove_healed_tokens
from plait.runtime.scheduler.sessions.session import Session, SessionError, SessionKey
from plait.runtime.scheduler.sessions.session_queue import Instruction, TextOverflow
from plait.runtime.scheduler.sessions.validation import validate_call
from plait.runtime.transport.base import ClientId

SessionInstruction = Append | SessionCall | Fork | Close
INTERNAL_ERROR = "the runtime failed on this request; see its log"


class SessionManager:
    """All sessions of all clients."""

    def __init__(
        self,
        batch_scheduler: BatchScheduler,
        compiler: CompilePool,
        config: EngineConfig,
        output_processor: OutputProcessor,
        model: Welcome,
        send: Send,
        error_log: ErrorLog,
    ) -> None:
        self.batch_scheduler, self._adapters = batch_scheduler, batch_scheduler.adapters
        self.cache: PrefixCache = batch_scheduler.cache
        self.calls = CallTracker(batch_scheduler, compiler, send, self._advance)
        self.config, self.output_processor = config, output_processor
        self.vocabulary = vocabulary = output_processor.vocabulary
        self.max_length, self.model = output_processor.max_length, model
        self.error_log = error_log
        requests = PrefixRequests(batch_scheduler, vocabulary)
        drawing = (requests, vocabulary, output_processor.token_masks, output_processor.max_length)
        self.particles, self.exact = ParticleSampling(*drawing), ExactSampling(*drawing)
        self._send = send
        self._sessions: dict[SessionKey, Session] = {}
        self._ready: list[Session] = []  # the stack of sessions that `_advance` works through
        self._programs: Counter[ProgramId] = Counter()  # number of sessions of each program

    def __len__(self) -> int:
        return len(self._sessions)

    def sequences(self) -> list[Sequence]:
        """Returns all sequences of sessions and requests, for the integrity check."""
        session_seqs = [session.seq for session in self._sessions.values()]
        calls = [session.active_call for session in self._sessions.values()]
        particles = [other for call in calls if isinstance(call, GenerationRequest) for other in call.prefix_requests]
        in_batches = (*self.batch_scheduler.running, *self.batch_scheduler.waiting)
        request_seqs = [request.seq for request in (*in_batches, *particles)]
        return list({id(seq): seq for seq in (*session_seqs, *request_seqs)}.values())

    # -- instructions -----------------------------------------------------------------------------

    def open(self, client: ClientId, message: Open) -> None:
        """Opens a session, unless a limit forbids it; calls in a session that was not opened fail."""
        key = SessionKey(client, message.session)
        is_name_too_long = len(message.tenant) > MAX_NAME_CHARS or len(message.cache_salt) > MAX_NAME_CHARS
        if is_name_too_long or key in self._sessions or len(self._sessions) >= self.config.max_sessions:
            return
        self._add(Session(key, message, self.max_length, None, self._adapter(message.adapter)))

    def _adapter(self, name: str) -> str:
        """The id of the adapter that has a name now; "": the model alone, or no adapter has it."""
        return self.model.adapters.get(name, "")

    def enqueue(self, client: ClientId, message: SessionInstruction) -> None:
        """Queues an instruction, which runs after those before it in its session."""
        session = self._sessions.get(SessionKey(client, message.session))
        if session is None:
            if isinstance(message, SessionCall):
                text = f"there is no such session (at most {self.config.max_sessions} can be open)"
                self._send(client, Failed(message.call, "overloaded", text))
            return
        if isinstance(message, SessionCall):
            if self.calls.num_open >= self.config.max_waiting_calls:
                self._reject_overloaded(
                    session, message, f"{self.calls.num_open} calls are waiting already; try again later"
                )
                return
        elif isinstance(message, Fork):
            self._register_children(session, message)
        if not session.queue.put(message, session.min_length):
            self._reject_overloaded(
                session, message, "too many instructions wait in this session; read their results first"
            )
            return
        if isinstance(message, SessionCall):
            self.calls.admit(session, message)
        self._advance(session)

    def _reject_overloaded(self, session: Session, message: SessionInstruction, text: str) -> None:
        """Rejects an instruction that exceeds a limit. Sets the error of its session, and of a fork's children."""
        error = SessionError("overloaded", text)
        if isinstance(message, SessionCall):
            self._send(session.key.client, Failed(message.call, error.kind, text))
        self._set_error(session, error)
        if isinstance(message, Fork):
            for child in self._pending_children(session, message):
                child.fork_parent = None
                self._set_error(child, error)

    def abort(self, client: ClientId, message: Abort) -> None:
        """Ends one call, or the whole session if the message names no call."""
        session = self._sessions.get(SessionKey(client, message.session))
        if session is None:
            return
        if message.call is None:
            self._remove_session(session, "the session was aborted")
        else:
            self.fail_call(session.key, message.call, "aborted", "the call was aborted", breaks_session=False)

    def drop_client(self, client: ClientId) -> None:
        """Removes the sessions of a client that disconnected."""
        for session in [session for key, session in self._sessions.items() if key.client == client]:
            self._remove_session(session, "the client disconnected")

    def drop_after_error(self, client: ClientId, message: ClientMessage) -> None:
        """Handles an internal error while processing `message`: removes its session and answers its call."""
        session_id = getattr(message, "session", None)
        session = self._sessions.get(SessionKey(client, session_id)) if session_id is not None else None
        if session is not None:
            self._remove_session(session, INTERNAL_ERROR)
        call_id = getattr(message, "call", None)
        if call_id is not None:
            self._send(client, Failed(call_id, "internal", INTERNAL_ERROR))

    def fail_expired_calls(self) -> None:
        """Fails the calls whose deadline has passed."""
        for deadline in self.calls.deadlines.pop_expired():
            session = self._sessions.get(deadline.key)
            call = session.active_call if session is not None else None
            kind, text = "deadline", f"the call took longer than its timeout of {deadline.timeout_s:g} s"
            if call is not None and call.call_id == deadline.call_id and self.calls.is_queued(call):
                kind, text = "queue_timeout", f"the call did not begin within its timeout of {deadline.timeout_s:g} s"
            self.fail_call(deadline.key, deadline.call_id, kind, text)

    def start_compiled_calls(self) -> None:
        """Starts the calls whose grammar is compiled, and fails those whose grammar was refused."""
        for request, outcome in self.calls.collect_compiled():
            try:
                self._start_constrained(request, outcome)
            except Exception as error:  # a matcher that raises at its start ends its own call
                self.calls.fail(request, "constraint", f"the constraint could not be started: {error!s:.200}")

    def fail_call(self, key: SessionKey, call_id: int, kind: str, text: str, *, breaks_session: bool = True) -> None:
        """Fails a call that is active or queued; does nothing if it has ended."""
        session = self._sessions.get(key)
        if session is None:
            return
        if session.active_call is not None and session.active_call.call_id == call_id:
            self.calls.fail(session.active_call, kind, text, breaks_session=breaks_session)
            return
        call = session.queue.pop_call(call_id, self._replacement_of)
        if call is not None:
            self.calls.reject(session, call_id, kind, text)
            if breaks_session:
                self._set_error(session, SessionError(kind, text))

    def _replacement_of(self, call: SessionCall) -> Append | None:
        """Returns the instruction that replaces a removed call: it appends the text that was to follow the value."""
        if not isinstance(call, Generate) or not call.trailing_text:
            return None
        return Append(call.session, [int(token) for token in self.vocabulary.encode(call.trailing_text)])

    # -- running instructions ---------------------------------------------------------------------

    def _advance(self, session: Session) -> None:
        """Runs the queued instructions of a session, and of the children that they fork, until a call becomes active.

        An instruction may call this method again. The inner call only pushes its session on `_ready`, so that a chain
        of forks does not recurse.
        """
        self._ready.append(session)
        if len(self._ready) > 1:
            return
        while self._ready:
            current = self._ready[-1]
            if not current.queue or current.active_call is not None or current.fork_parent is not None:
                self._ready.pop()
                continue
            instruction = current.queue.pop()
            try:
                self._execute(current, instruction)
            except Exception as error:  # an internal error must not end the other sessions
                self.error_log.record(error)
                self._fail_instruction(current, instruction)

    def _execute(self, session: Session, instruction: Instruction) -> None:
        if isinstance(instruction, Append):
            self._append(session, instruction)
        elif isinstance(instruction, Fork):
            self._ready.extend(self._materialize_fork(session, instruction))
        elif isinstance(instruction, Close):
            self._remove_session(session, "the session was closed")
        elif isinstance(instruction, TextOverflow):
            text = f"the text has {instruction.num_tokens} tokens or more; the context holds {self.max_length}"
            session.error = session.error or SessionError("context_overflow", text, is_in_text=True)
        else:
            self._begin(session, instruction)

    def _fail_instruction(self, session: Session, instruction: Instruction) -> None:
        session.error = session.error or SessionError("internal", INTERNAL_ERROR)
        if isinstance(instruction, SessionCall):
            if session.active_call is not None:
                self.calls.fail(session.active_call, "internal", INTERNAL_ERROR)
            else:
                self.calls.reject(session, instruction.call, "internal", INTERNAL_ERROR)

    def _append(self, session: Session, message: Append) -> None:
        token_ids, vocab_size = message.token_ids, len(self.vocabulary)
        length = len(session.seq) + len(token_ids)
        if length > self.max_length:
            text = f"the text has {length} tokens; the context holds {self.max_length}"
            session.error = session.error or SessionError("context_overflow", text, is_in_text=True)
        elif min(token_ids) < 0 or max(token_ids) >= vocab_size:
            text = f"a token id is outside the vocabulary of {vocab_size}"
            session.error = session.error or SessionError("invalid", text, is_in_text=True)
        elif session.error is None:
            session.seq.tokens.extend(token_ids)

    def _begin(self, session: Session, message: SessionCall) -> None:
        """Starts a call, or rejects it if it is not valid."""
        error = validate_call(session, message, self.model, len(self.vocabulary), self.max_length)
        if error is not None:
            self.calls.reject(session, message.call, error.kind, error.text)
            session.error = session.error or error
            return
        if isinstance(message, Generate):
            self._begin_generation(session, message)
        elif isinstance(message, Embed):
            assert self.model.embeddings is not None
            pooling_request = PoolingRequest(session.owner, session.seq, message, self.model.embeddings)
            self.calls.start(session, pooling_request)
            self.batch_scheduler.add(pooling_request)
        else:
            selection = make_selection(session, message, self.cache)
            self.calls.start(session, selection)
            for request in (*selection.requests, *selection.unconditional_requests):
                self.batch_scheduler.add(request)

    def _begin_generation(self, session: Session, message: Generate) -> None:
        params = message.sampling
        seed = secrets.randbits(63) if params.seed is None else params.seed
        healing = remove_healed_tokens(session, message, self.config.token_healing, self.vocabulary, self.cache)
        request = GenerationRequest(session.owner, session.seq, message.call, params, seed)
        request.healing = healing
        self.calls.start(session, request)
        if message.constraint is not None:
            request.constraint_hash = hash((message.constraint, message.trailing_text))
            if message.trailing_text:
                self.output_processor.set_trailing_text(request, message.trailing_text)
            request.exact_spec = message.constraint if params.exact else None
            value_spec = message.constraint.then if isinstance(message.constraint, Reasoning) else message.constraint
            request.has_free_text = isinstance(value_spec, Structural) and value_spec.free_text
            self.calls.submit_grammar(request, message.constraint)
            return
        self.batch_scheduler.drafter.begin(request)
        self.batch_scheduler.add(request)

    def _start_constrained(self, request: GenerationRequest, outcome: Grammar | GrammarError) -> None:
        if not self.calls.is_active(request):
            return
        if isinstance(outcome, GrammarError):
            kind = "overloaded" if isinstance(outcome, CompileQueueFull) else "constraint"
            where = outcome.where if isinstance(outcome.where, str) else None
            self.calls.fail(request, kind, str(outcome), where=where)
            return
        request.metrics.compile_s = time.monotonic() - request.metrics.arrival_time
        if outcome.warnings:
            request.warnings = outcome.warnings
            self.error_log.warn(outcome.warnings)
        if request.params.samples_sequence:
            self._start_sequence_sampling(request, outcome)
            return
        try:
            finish_info = self.output_processor.start(request, outcome.matcher())
        except CompletionDoesNotFit as error:
            self.calls.fail(request, VALUE_DOES_NOT_FIT, str(error))
            return
        if finish_info is None:
            self.batch_scheduler.drafter.begin(request)
            self.batch_scheduler.add(request)
        else:
            self.calls.finish_generation(request, finish_info)

    def _start_sequence_sampling(self, request: GenerationRequest, grammar: Grammar) -> None:
        try:
            finish_info = (self.exact if request.params.exact else self.particles).start(request, grammar)
        except RuntimeError as error:
            self.calls.fail(request, "constraint", str(error))
            return
        if finish_info is not None:
            self.calls.finish_generation(request, finish_info)

    def _register_children(self, parent: Session, message: Fork) -> None:
        opened, adapter = parent.open_message, parent.seq.namespace.adapter  # its name may be another one's by now
        if message.adapter is not None:
            opened = msgspec.structs.replace(opened, adapter=message.adapter)
            adapter = self._adapter(message.adapter)
        for child in message.children[:MAX_FORK_CHILDREN]:  # others are not opened, so that calls in them fail
            key = SessionKey(parent.key.client, child)
            if key not in self._sessions and len(self._sessions) < self.config.max_sessions:
                self._add(Session(key, opened, self.max_length, parent.key, adapter))

    def _materialize_fork(self, parent: Session, message: Fork) -> list[Session]:
        """Gives the children of a fork the parent's text, sharing its pages."""
        materialized = self._pending_children(parent, message)
        for child in materialized:
            child.fork_parent = None
            same_cache = child.seq.namespace == parent.seq.namespace
            text = parent.seq.tokens.view()
            child.seq = self.cache.fork(parent.seq) if same_cache else Sequence(child.seq.namespace, text)
            child.error = child.error or parent.error
        return materialized

    def _pending_children(self, parent: Session, message: Fork) -> list[Session]:
        """Returns the children of a fork that have no text yet, without those that another session opened first."""
        keys = dict.fromkeys(SessionKey(parent.key.client, child) for child in message.children[:MAX_FORK_CHILDREN])
        children = [self._sessions.get(key) for key in keys]
        return [child for child in children if child is not None and child.fork_parent == parent.key]

    # -- the end of a session ---------------------------------------------------------------------

    def _add(self, session: Session) -> None:
        self._sessions[session.key] = session
        self._programs[session.owner.program_id] += 1
        name, adapter = session.open_message.adapter, session.seq.namespace.adapter
        if adapter and self._adapters is not None:
            self._adapters.count_session(adapter, 1)
        elif name:
            self._set_error(session, SessionError("invalid", f"there is no adapter {name!r:.100}"))

    def _set_error(self, session: Session, error: SessionError) -> None:
        session.error = session.error or error
        self._advance(session)

    def _remove_session(self, session: Session, reason: str) -> None:
        """Removes a session. Its calls, and those of children that still wait for its text, fail as "aborted"."""
        queued = session.queue.clear()
        if session.active_call is not None:
            self.calls.fail(session.active_call, "aborted", reason)
        for instruction in queued:
            if isinstance(instruction, SessionCall):
                self.calls.reject(session, instruction.call, "aborted", reason)
            elif isinstance(instruction, Fork):
                for child in self._materialize_fork(session, instruction):
                    self._set_error(child, SessionError("aborted", reason))
        self.cache.free(session.seq)
        if self._sessions.pop(session.key, None) is not None:
            if session.seq.namespace.adapter and self._adapters is not None:
                self._adapters.count_session(session.seq.namespace.adapter, -1)
            program_id = session.owner.program_id
            self._programs[program_id] -= 1
            if not self._programs[program_id]:
                del self._programs[program_id]
                self.batch_scheduler.fairness.forget_program(program_id)
