"""Sessions and their instructions: opens, appends, forks, starts calls, closes, each session in its own order.

Knows: sessions, instructions, when a call begins. Must not know: how a call ends, batches, logits, sockets.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter

from plait.constrained import CompilePool, Grammar, GrammarError, Structural, Vocabulary
from plait.runtime.config import EngineConfig
from plait.runtime.messages import (
    MAX_FORK,
    MAX_NAME,
    Abort,
    Append,
    Close,
    Embed,
    Failed,
    Fork,
    Generate,
    Open,
    Request,
    SessionCall,
    Welcome,
)
from plait.runtime.scheduler.backlog import Instruction, TooLong
from plait.runtime.scheduler.calls import Calls, Send
from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.faults import Faults
from plait.runtime.scheduler.generating import Generating, Unfinishable
from plait.runtime.scheduler.lookup import PromptLookup
from plait.runtime.scheduler.policy import Policy
from plait.runtime.scheduler.prefix_cache import PrefixCache
from plait.runtime.scheduler.refusals import refusal
from plait.runtime.scheduler.rows import Generation
from plait.runtime.scheduler.scoring import selection_of
from plait.runtime.scheduler.sequence import Sequence
from plait.runtime.scheduler.session import Broken, ClientId, Session, SessionKey

Sent = Append | SessionCall | Fork | Close


class Sessions:
    """All sessions of one scheduler."""

    def __init__(
        self,
        policy: Policy,
        compiler: CompilePool,
        vocabulary: Vocabulary,
        config: EngineConfig,
        generating: Generating,
        model: Welcome,
        send: Send,
    ) -> None:
        self.policy = policy
        self.cache: PrefixCache = policy.cache
        self.calls = Calls(policy, compiler, send, self._advance)
        self.vocabulary = vocabulary
        self.config = config
        self.generating = generating
        self.max_length, self.model = generating.max_length, model
        self.faults = Faults()
        self._send = send
        self._sessions: dict[SessionKey, Session] = {}
        self._ready: list[Session] = []  # to be advanced, see `_advance`
        self._programs: Counter[tuple[ClientId, int]] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def sequences(self) -> list[Sequence]:
        """Every sequence that lives, for the integrity check."""
        scoring = [row.seq for row in (*self.policy.running, *self.policy.waiting)]
        return list({id(s): s for s in [*(s.seq for s in self._sessions.values()), *scoring]}.values())

    # -- instructions -----------------------------------------------------------------------------

    def open(self, client: ClientId, message: Open) -> None:
        key = SessionKey(client, message.session)
        too_long = len(message.tenant) > MAX_NAME or len(message.cache_salt) > MAX_NAME
        if too_long or key in self._sessions or len(self._sessions) >= self.config.max_sessions:
            return  # calls in it will be told that it does not exist
        self._add(Session(key, message, self.max_length))

    def enqueue(self, client: ClientId, message: Sent) -> None:
        """Takes an instruction; it runs once those before it in the session are done."""
        session = self._sessions.get(SessionKey(client, message.session))
        if session is None:
            if isinstance(message, SessionCall):
                text = f"there is no such session (at most {self.config.max_sessions} can be open)"
                self._send(client, Failed(message.call, "overloaded", text))
            return
        if isinstance(message, SessionCall):
            if self.calls.num_open >= self.config.max_waiting_calls:
                self._refuse(session, message, f"{self.calls.num_open} calls are waiting already; try again later")
                return
        elif isinstance(message, Fork):
            self._name_children(session, message)
        if not session.queue.put(message, session.num_certain):
            self._refuse(session, message, "too many instructions wait in this session; read their results first")
            return
        if isinstance(message, SessionCall):
            self.calls.admit(session, message)
        self._advance(session)

    def _refuse(self, session: Session, message: Sent, text: str) -> None:
        """There is no room for an instruction: its session, and sessions that it was to bear, go no further."""
        why = Broken("overloaded", text)
        if isinstance(message, SessionCall):
            self._send(session.key.client, Failed(message.call, why.kind, text))
        self._break(session, why)
        if isinstance(message, Fork):
            for child in self._unborn(session, message):
                child.is_born = True
                self._break(child, why)

    def abort(self, client: ClientId, message: Abort) -> None:
        """Ends one call or the whole session now."""
        session = self._sessions.get(SessionKey(client, message.session))
        if session is None:
            return
        if message.call is None:
            self._drop(session, "the session was aborted")
        else:
            self.fail_call(session.key, message.call, "aborted", "the call was aborted", breaks=False)

    def drop_client(self, client: ClientId) -> None:
        """The client vanished: its sessions end and nobody is told."""
        for session in [s for key, s in self._sessions.items() if key.client == client]:
            self._drop(session, "the client is gone")

    def drop_after_fault(self, client: ClientId, request: Request) -> None:
        """A fault of ours while carrying out `request`: its session ends, and its call is answered."""
        why = "the runtime failed on this request; see its log"
        number = getattr(request, "session", None)
        session = self._sessions.get(SessionKey(client, number)) if number is not None else None
        if session is not None:
            self._drop(session, why)
        call_id = getattr(request, "call", None)
        if call_id is not None:
            self._send(client, Failed(call_id, "internal", why))

    def fail_late_calls(self) -> None:
        """Ends the calls whose deadline has passed."""
        for due in self.calls.deadlines.pop_late():
            text = f"the call took longer than its timeout of {due.timeout_s:g} s"
            self.fail_call(due.key, due.call_id, "deadline", text)

    def take_compiled(self) -> None:
        """Lets the rows whose grammar is ready, or refused, go on."""
        for gen, outcome in self.calls.compiled():
            try:
                self._start_constrained(gen, outcome)
            except Exception as error:  # a grammar that breaks as it starts ends its own call
                self.calls.fail(gen, "constraint", f"the constraint could not be started: {error!s:.200}")

    def fail_call(self, key: SessionKey, call_id: int, kind: str, text: str, *, breaks: bool = True) -> None:
        """`fail` for a call that may not have begun, or may be over."""
        session = self._sessions.get(key)
        if session is None:
            return
        if session.active is not None and session.active.call_id == call_id:
            self.calls.fail(session.active, kind, text, breaks=breaks)
            return
        if session.queue.pop_call(call_id):
            self.calls.reject(session, call_id, kind, text)
            if breaks:
                self._break(session, Broken(kind, text))

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
            if not at.queue or at.active is not None or not at.is_born:
                self._ready.pop()
                continue
            instruction = at.queue.pop()
            try:
                self._carry_out(at, instruction)
            except Exception as error:  # a fault of ours: its call is answered, and the other sessions go on
                self.faults.tell(error)
                self._fault(at, instruction)

    def _carry_out(self, session: Session, instruction: Instruction) -> None:
        if isinstance(instruction, Append):
            self._append(session, instruction)
        elif isinstance(instruction, Fork):
            self._ready.extend(self._bear(session, instruction))
        elif isinstance(instruction, Close):
            self._drop(session, "the session was closed")
        elif isinstance(instruction, TooLong):
            text = f"the text has {instruction.num_tokens} tokens or more; the context holds {self.max_length}"
            session.broken = session.broken or Broken("context_overflow", text)
        else:
            self._begin(session, instruction)

    def _fault(self, session: Session, instruction: Instruction) -> None:
        why = "the runtime failed on this request; see its log"
        session.broken = session.broken or Broken("internal", why)
        if isinstance(instruction, SessionCall):
            if session.active is not None:
                self.calls.fail(session.active, "internal", why)
            else:
                self.calls.reject(session, instruction.call, "internal", why)

    def _append(self, session: Session, message: Append) -> None:
        ids, limit, total = message.token_ids, len(self.vocabulary), len(session.seq) + len(message.token_ids)
        if total > self.max_length:
            text = f"the text has {total} tokens; the context holds {self.max_length}"
            session.broken = session.broken or Broken("context_overflow", text)
        elif min(ids) < 0 or max(ids) >= limit:
            session.broken = session.broken or Broken("invalid", f"a token id is outside the vocabulary of {limit}")
        elif session.broken is None:
            session.seq.tokens.extend(ids)

    def _begin(self, session: Session, message: SessionCall) -> None:
        """Starts a call, or fails it before any work."""
        refused = refusal(session, message, self.model, len(self.vocabulary), self.max_length)
        if refused is not None:
            self.calls.reject(session, message.call, refused.kind, refused.text)
            session.broken = session.broken or refused
            return
        if isinstance(message, Generate):
            self._begin_generation(session, message)
        elif isinstance(message, Embed):
            assert self.model.embeddings is not None
            session.active = Embedding(session, message, self.model.embeddings)
            self.policy.add(session.active)
        else:
            selection = session.active = selection_of(session, message, self.cache)
            for row in (*selection.rows, *selection.unconditional_rows):
                self.policy.add(row)

    def _begin_generation(self, session: Session, message: Generate) -> None:
        params = message.sampling
        seed = secrets.randbits(63) if params.seed is None else params.seed
        gen = session.active = Generation(session, message.call, params, seed)
        depends = params.logprobs or params.frequency_penalty or params.presence_penalty
        if message.constraint is None and not depends:
            gen.lookup = PromptLookup()
        if message.constraint is None:
            self.policy.add(gen)
        else:
            gen.has_free_text = isinstance(message.constraint, Structural) and message.constraint.free_text
            self.calls.await_grammar(gen, message.constraint)

    def _start_constrained(self, gen: Generation, outcome: Grammar | GrammarError) -> None:
        if gen.session.active is not gen:
            return
        if isinstance(outcome, GrammarError):
            self.calls.fail(gen, "constraint", str(outcome))
            return
        gen.meter.compile_s = time.monotonic() - gen.meter.arrived
        gen.matcher = outcome.matcher()
        try:
            ending = self.generating.begin(gen)
        except Unfinishable as error:
            self.calls.fail(gen, "constraint", str(error))
            return
        if ending is None:
            self.policy.add(gen)
        else:
            self.calls.finish_generation(gen, ending)

    def _name_children(self, parent: Session, message: Fork) -> None:
        for child in message.children[:MAX_FORK]:  # calls in the others are told that they do not exist
            key = SessionKey(parent.key.client, child)
            if key not in self._sessions and len(self._sessions) < self.config.max_sessions:
                self._add(Session(key, parent.opened, self.max_length, is_born=False))

    def _bear(self, parent: Session, message: Fork) -> list[Session]:
        """The children begin with the parent's text and share its pages."""
        born = self._unborn(parent, message)
        for child in born:
            child.is_born = True
            child.seq = self.cache.fork(parent.seq)
            child.broken = child.broken or parent.broken
        return born

    def _unborn(self, parent: Session, message: Fork) -> list[Session]:
        keys = dict.fromkeys(SessionKey(parent.key.client, number) for number in message.children[:MAX_FORK])
        children = [self._sessions.get(key) for key in keys]
        return [child for child in children if child is not None and not child.is_born]

    # -- how a session ends -----------------------------------------------------------------------

    def _add(self, session: Session) -> None:
        self._sessions[session.key] = session
        self._programs[session.program] += 1

    def _break(self, session: Session, why: Broken) -> None:
        session.broken = session.broken or why
        self._advance(session)

    def _drop(self, session: Session, why: str) -> None:
        """Removes the session now; calls not yet done fail as aborted, children not yet born with them."""
        queued = session.queue.clear()
        if session.active is not None:
            self.calls.fail(session.active, "aborted", why)
        for instruction in queued:
            if isinstance(instruction, SessionCall):
                self.calls.reject(session, instruction.call, "aborted", why)
            elif isinstance(instruction, Fork):
                for child in self._bear(session, instruction):
                    self._break(child, Broken("aborted", why))
        self.cache.forget(session.seq)
        if self._sessions.pop(session.key, None) is not None:
            self._programs[session.program] -= 1
            if not self._programs[session.program]:
                del self._programs[session.program]
                self.policy.fairness.forget_program(session.program)
