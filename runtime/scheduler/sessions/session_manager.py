"""Sessions and their instructions: opens, appends, forks, starts calls, closes, each session in its own order.

Knows: sessions, instructions, when a call begins. Must not know: how a call ends, batches, logits, sockets.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter

from plait.constrained import CompilePool, Grammar, GrammarError, Structural, Vocabulary
from plait.runtime.batch.ngram_proposer import NgramProposer
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.config import EngineConfig
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
from plait.runtime.scheduler.batching import BatchScheduler
from plait.runtime.scheduler.error_log import ErrorLog
from plait.runtime.scheduler.output_processor import CompletionDoesNotFit, OutputProcessor
from plait.runtime.scheduler.sessions.calls import CallTracker, Send
from plait.runtime.scheduler.sessions.choice_scoring import make_selection
from plait.runtime.scheduler.sessions.session import ClientId, Session, SessionError, SessionKey
from plait.runtime.scheduler.sessions.session_queue import Instruction, TextOverflow
from plait.runtime.scheduler.sessions.validation import validate_call

SessionInstruction = Append | SessionCall | Fork | Close


class SessionManager:
    """All sessions of one scheduler."""

    def __init__(
        self,
        batch_scheduler: BatchScheduler,
        compiler: CompilePool,
        vocabulary: Vocabulary,
        config: EngineConfig,
        output_processor: OutputProcessor,
        model: Welcome,
        send: Send,
    ) -> None:
        self.batch_scheduler = batch_scheduler
        self.cache: PrefixCache = batch_scheduler.cache
        self.calls = CallTracker(batch_scheduler, compiler, send, self._advance)
        self.vocabulary = vocabulary
        self.config = config
        self.output_processor = output_processor
        self.max_length, self.model = output_processor.max_length, model
        self.error_log = ErrorLog()
        self._send = send
        self._sessions: dict[SessionKey, Session] = {}
        self._ready: list[Session] = []  # to be advanced, see `_advance`
        self._programs: Counter[tuple[ClientId, int]] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def sequences(self) -> list[Sequence]:
        """Every sequence that lives, for the integrity check."""
        scoring = [request.seq for request in (*self.batch_scheduler.running, *self.batch_scheduler.waiting)]
        return list({id(s): s for s in [*(s.seq for s in self._sessions.values()), *scoring]}.values())

    # -- instructions -----------------------------------------------------------------------------

    def open(self, client: ClientId, message: Open) -> None:
        key = SessionKey(client, message.session)
        too_long = len(message.tenant) > MAX_NAME_CHARS or len(message.cache_salt) > MAX_NAME_CHARS
        if too_long or key in self._sessions or len(self._sessions) >= self.config.max_sessions:
            return  # calls in it will be told that it does not exist
        self._add(Session(key, message, self.max_length))

    def enqueue(self, client: ClientId, message: SessionInstruction) -> None:
        """Takes an instruction; it runs once those before it in the session are done."""
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
        """There is no room for an instruction: its session, and sessions that it was to bear, go no further."""
        why = SessionError("overloaded", text)
        if isinstance(message, SessionCall):
            self._send(session.key.client, Failed(message.call, why.kind, text))
        self._set_error(session, why)
        if isinstance(message, Fork):
            for child in self._pending_children(session, message):
                child.is_materialized = True
                self._set_error(child, why)

    def abort(self, client: ClientId, message: Abort) -> None:
        """Ends one call or the whole session now."""
        session = self._sessions.get(SessionKey(client, message.session))
        if session is None:
            return
        if message.call is None:
            self._remove_session(session, "the session was aborted")
        else:
            self.fail_call(session.key, message.call, "aborted", "the call was aborted", breaks_session=False)

    def drop_client(self, client: ClientId) -> None:
        """The client vanished: its sessions end and nobody is told."""
        for session in [s for key, s in self._sessions.items() if key.client == client]:
            self._remove_session(session, "the client is gone")

    def drop_after_error(self, client: ClientId, message: ClientMessage) -> None:
        """A fault of ours while carrying out `message`: its session ends, and its call is answered."""
        why = "the runtime failed on this request; see its log"
        number = getattr(message, "session", None)
        session = self._sessions.get(SessionKey(client, number)) if number is not None else None
        if session is not None:
            self._remove_session(session, why)
        call_id = getattr(message, "call", None)
        if call_id is not None:
            self._send(client, Failed(call_id, "internal", why))

    def fail_expired_calls(self) -> None:
        """Ends the calls whose deadline has passed."""
        for due in self.calls.deadlines.pop_expired():
            text = f"the call took longer than its timeout of {due.timeout_s:g} s"
            self.fail_call(due.key, due.call_id, "deadline", text)

    def start_compiled_calls(self) -> None:
        """Lets the rows whose grammar is ready, or refused, go on."""
        for gen, outcome in self.calls.collect_compiled():
            try:
                self._start_constrained(gen, outcome)
            except Exception as error:  # a grammar that breaks as it starts ends its own call
                self.calls.fail(gen, "constraint", f"the constraint could not be started: {error!s:.200}")

    def fail_call(self, key: SessionKey, call_id: int, kind: str, text: str, *, breaks_session: bool = True) -> None:
        """`fail` for a call that may not have begun, or may be over."""
        session = self._sessions.get(key)
        if session is None:
            return
        if session.active_call is not None and session.active_call.call_id == call_id:
            self.calls.fail(session.active_call, kind, text, breaks_session=breaks_session)
            return
        if session.queue.pop_call(call_id):
            self.calls.reject(session, call_id, kind, text)
            if breaks_session:
                self._set_error(session, SessionError(kind, text))

    # -- how an instruction runs ------------------------------------------------------------------

    def _advance(self, session: Session) -> None:
        """Runs queued instructions until a call has to be waited for; those of sessions set free by them as well.

        What runs may call this again: it then only notes the session, so that no chain of forks grows the stack.
        """
        self._ready.append(session)
        if len(self._ready) > 1:
            return
        while self._ready:
            at = self._ready[-1]
            if not at.queue or at.active_call is not None or not at.is_materialized:
                self._ready.pop()
                continue
            instruction = at.queue.pop()
            try:
                self._execute(at, instruction)
            except Exception as error:  # a fault of ours: its call is answered, and the other sessions go on
                self.error_log.record(error)
                self._fail_instruction(at, instruction)

    def _execute(self, session: Session, instruction: Instruction) -> None:
        if isinstance(instruction, Append):
            self._append(session, instruction)
        elif isinstance(instruction, Fork):
            self._ready.extend(self._materialize_fork(session, instruction))
        elif isinstance(instruction, Close):
            self._remove_session(session, "the session was closed")
        elif isinstance(instruction, TextOverflow):
            text = f"the text has {instruction.num_tokens} tokens or more; the context holds {self.max_length}"
            session.error = session.error or SessionError("context_overflow", text)
        else:
            self._begin(session, instruction)

    def _fail_instruction(self, session: Session, instruction: Instruction) -> None:
        why = "the runtime failed on this request; see its log"
        session.error = session.error or SessionError("internal", why)
        if isinstance(instruction, SessionCall):
            if session.active_call is not None:
                self.calls.fail(session.active_call, "internal", why)
            else:
                self.calls.reject(session, instruction.call, "internal", why)

    def _append(self, session: Session, message: Append) -> None:
        ids, limit, total = message.token_ids, len(self.vocabulary), len(session.seq) + len(message.token_ids)
        if total > self.max_length:
            text = f"the text has {total} tokens; the context holds {self.max_length}"
            session.error = session.error or SessionError("context_overflow", text)
        elif min(ids) < 0 or max(ids) >= limit:
            session.error = session.error or SessionError("invalid", f"a token id is outside the vocabulary of {limit}")
        elif session.error is None:
            session.seq.tokens.extend(ids)

    def _begin(self, session: Session, message: SessionCall) -> None:
        """Starts a call, or fails it before any work."""
        error = validate_call(session, message, self.model, len(self.vocabulary), self.max_length)
        if error is not None:
            self.calls.reject(session, message.call, error.kind, error.text)
            session.error = session.error or error
            return
        if isinstance(message, Generate):
            self._begin_generation(session, message)
        elif isinstance(message, Embed):
            assert self.model.embeddings is not None
            session.active_call = PoolingRequest(session, message, self.model.embeddings)
            self.batch_scheduler.add(session.active_call)
        else:
            selection = session.active_call = make_selection(session, message, self.cache)
            for request in (*selection.requests, *selection.unconditional_requests):
                self.batch_scheduler.add(request)

    def _begin_generation(self, session: Session, message: Generate) -> None:
        params = message.sampling
        seed = secrets.randbits(63) if params.seed is None else params.seed
        gen = session.active_call = GenerationRequest(session, message.call, params, seed)
        depends = params.logprobs or params.frequency_penalty or params.presence_penalty
        if message.constraint is None and not depends:
            gen.ngram_proposer = NgramProposer()
        if message.constraint is None:
            self.batch_scheduler.add(gen)
        else:
            gen.has_free_text = isinstance(message.constraint, Structural) and message.constraint.free_text
            self.calls.submit_grammar(gen, message.constraint)

    def _start_constrained(self, gen: GenerationRequest, outcome: Grammar | GrammarError) -> None:
        if gen.session.active_call is not gen:
            return
        if isinstance(outcome, GrammarError):
            self.calls.fail(gen, "constraint", str(outcome))
            return
        gen.metrics.compile_s = time.monotonic() - gen.metrics.arrival_time
        gen.matcher = outcome.matcher()
        try:
            finish_info = self.output_processor.begin(gen)
        except CompletionDoesNotFit as error:
            self.calls.fail(gen, "constraint", str(error))
            return
        if finish_info is None:
            self.batch_scheduler.add(gen)
        else:
            self.calls.finish_generation(gen, finish_info)

    def _register_children(self, parent: Session, message: Fork) -> None:
        for child in message.children[:MAX_FORK_CHILDREN]:  # calls in the others are told that they do not exist
            key = SessionKey(parent.key.client, child)
            if key not in self._sessions and len(self._sessions) < self.config.max_sessions:
                self._add(Session(key, parent.open_message, self.max_length, is_materialized=False))

    def _materialize_fork(self, parent: Session, message: Fork) -> list[Session]:
        """The children begin with the parent's text and share its pages."""
        materialized = self._pending_children(parent, message)
        for child in materialized:
            child.is_materialized = True
            child.seq = self.cache.fork(parent.seq)
            child.error = child.error or parent.error
        return materialized

    def _pending_children(self, parent: Session, message: Fork) -> list[Session]:
        keys = dict.fromkeys(SessionKey(parent.key.client, number) for number in message.children[:MAX_FORK_CHILDREN])
        children = [self._sessions.get(key) for key in keys]
        return [child for child in children if child is not None and not child.is_materialized]

    # -- how a session ends -----------------------------------------------------------------------

    def _add(self, session: Session) -> None:
        self._sessions[session.key] = session
        self._programs[session.program] += 1

    def _set_error(self, session: Session, why: SessionError) -> None:
        session.error = session.error or why
        self._advance(session)

    def _remove_session(self, session: Session, why: str) -> None:
        """Removes the session now; calls not yet done fail as aborted, children not yet born with them."""
        queued = session.queue.clear()
        if session.active_call is not None:
            self.calls.fail(session.active_call, "aborted", why)
        for instruction in queued:
            if isinstance(instruction, SessionCall):
                self.calls.reject(session, instruction.call, "aborted", why)
            elif isinstance(instruction, Fork):
                for child in self._materialize_fork(session, instruction):
                    self._set_error(child, SessionError("aborted", why))
        self.cache.free(session.seq)
        if self._sessions.pop(session.key, None) is not None:
            self._programs[session.program] -= 1
            if not self._programs[session.program]:
                del self._programs[session.program]
                self.batch_scheduler.fairness.forget_program(session.program)
