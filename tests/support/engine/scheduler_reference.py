"""A slow, obvious model of the scheduler's sessions: which are open, what text they hold, how each call must end.

It computes results from the complete token list of one session, without cache, batches and pages. Where the order of
events decides (an abort, a deadline), it takes how the call ended from the replies and checks that this was allowed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from fake_engine import EOS, LETTERS, VOCAB, logits_after, logprob, state_of

from plait.runtime.messages import (
    Abort,
    Append,
    Close,
    Embed,
    Failed,
    Finished,
    Fork,
    Generate,
    Open,
    Select,
    SessionCall,
    Tokens,
)
from plait.runtime.sampling.logit_ops import DrawState
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations

OUT_OF_TIME = {"deadline", "queue_timeout"}


@dataclass
class Limits:
    """`grammars`: constraint -> the tokens that it spells; a constraint that is not in it is refused."""

    max_length: int
    max_sessions: int
    max_waiting_calls: int
    grammars: dict


@dataclass(eq=False)
class ReferenceCall:
    """A call that was sent. `end`: its final reply; None while there is none. `has_started`: it was not refused."""

    message: SessionCall
    deadline: float | None
    tokens: list[int] = field(default_factory=list)
    end: Finished | Failed | None = None
    has_started: bool = False

    def assert_failed(self, *kinds: str) -> None:
        assert isinstance(self.end, Failed) and self.end.kind in kinds, (self.message, self.end, kinds)


@dataclass(eq=False)
class ReferenceSession:
    """`error`: the kind of the first failure. `queue`: its first call is the active one. `fork_parent`: of a child."""

    key: tuple[bytes, int]
    opened: Open
    is_materialized: bool = True
    fork_parent: tuple[bytes, int] | None = None
    text: list[int] = field(default_factory=list)
    queue: deque = field(default_factory=deque)
    error: str | None = None


class Reference:
    """Mirrors messages, replies and the clock. Every method asserts that the replies so far are the right ones."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sessions: dict[tuple[bytes, int], ReferenceSession] = {}
        self.calls: dict[tuple[bytes, int], ReferenceCall] = {}  # without a checked end
        self.may_fail: set[int] = set()  # calls for which the model raised a second time since the last `check`
        self.ends: Counter = Counter()  # "finished" or the kind of the failure -> calls

    # -- what happened --------------------------------------------------------------------------------

    def on_replies(self, replies) -> None:
        """Assigns replies to calls. No call gets a reply after its end."""
        for client, reply in replies:
            call = self.calls[client, reply.call]
            assert call.end is None, "a reply came after the call's end"
            if isinstance(reply, Tokens):
                call.tokens += reply.token_ids
            else:
                call.end = reply

    def on_time(self, now: float) -> None:
        """Every call whose deadline has passed has ended. A queued one breaks its session at once."""
        for session in list(self.sessions.values()):
            active = self._active(session)
            for call in [item for item in session.queue if isinstance(item, ReferenceCall)]:
                if call.deadline is None or call.deadline > now:
                    continue
                assert call.end is not None, "a call outlived its deadline"
                if call is not active:
                    call.assert_failed(*OUT_OF_TIME)  # queue_timeout: that of the active call
                    self._forget(session, call)
                    session.error = session.error or "deadline"
            self._advance(session)

    def on_progress(self) -> None:
        for session in list(self.sessions.values()):
            self._advance(session)
        self.may_fail = set()

    def on_message(self, client: bytes, message, now: float) -> None:
        if isinstance(message, Open):
            key = client, message.session
            if key not in self.sessions and len(self.sessions) < self.limits.max_sessions:
                self.sessions[key] = ReferenceSession(key, message)
            return
        session = self.sessions.get((client, message.session))
        if isinstance(message, Abort):
            if session is not None:
                self._abort(session, message)
        elif isinstance(message, SessionCall):
            self._enqueue_call(client, session, message)
        elif session is not None:
            if isinstance(message, Fork):
                self._register_children(session, message)
            session.queue.append(message)
            self._advance(session)

    def on_disconnect(self, client: bytes) -> None:
        for key in [key for key in self.sessions if key[0] == client]:
            if key in self.sessions:
                self._remove(self.sessions[key])
        assert not [key for key in self.sessions if key[0] == client]

    def sent(self, client: bytes, message: SessionCall, now: float) -> None:
        """Called before the message is handled, so that its replies have a call."""
        timeout_s = message.sampling.timeout_s if isinstance(message, Generate) else message.timeout_s
        self.calls[client, message.call] = ReferenceCall(message, None if timeout_s is None else now + timeout_s)

    # -- sessions -------------------------------------------------------------------------------------

    def _enqueue_call(self, client: bytes, session: ReferenceSession | None, message: SessionCall) -> None:
        call = self.calls[client, message.call]
        if session is None:
            call.assert_failed("overloaded")
            self._count_end(client, call)
            return
        num_open = sum(isinstance(item, ReferenceCall) for other in self.sessions.values() for item in other.queue)
        if num_open >= self.limits.max_waiting_calls:
            call.assert_failed("overloaded")
            self._count_end(client, call)
            session.error = session.error or "overloaded"
        else:
            session.queue.append(call)
        self._advance(session)

    def _register_children(self, parent: ReferenceSession, message: Fork) -> None:
        for child in message.children:
            key = parent.key[0], child
            if key not in self.sessions and len(self.sessions) < self.limits.max_sessions:
                self.sessions[key] = ReferenceSession(key, parent.opened, False, parent.key)

    def _materialize(self, parent: ReferenceSession, message: Fork) -> list[ReferenceSession]:
        keys = dict.fromkeys((parent.key[0], child) for child in message.children)
        children = [self.sessions[key] for key in keys if key in self.sessions]
        pending = [child for child in children if not child.is_materialized and child.fork_parent == parent.key]
        for child in pending:
            child.is_materialized, child.text = True, list(parent.text)
            child.error = child.error or parent.error
        return pending

    def _abort(self, session: ReferenceSession, message: Abort) -> None:
        if message.call is None:
            self._remove(session)
            return
        call = next((c for c in session.queue if isinstance(c, ReferenceCall) and c.message.call == message.call), None)
        if call is None:
            return
        call.assert_failed("aborted")
        if call is self._active(session):
            self._check_partial(session, call)
            session.text += call.tokens
        self._forget(session, call)
        self._advance(session)

    def _remove(self, session: ReferenceSession, is_idle: bool = False) -> None:
        """The session ends: its calls are aborted, and so are the children that wait for its text."""
        if not is_idle and self._active(session) is not None:
            session.error = "aborted"
        queue = list(session.queue)
        session.queue.clear()
        children = []
        for item in queue:
            if isinstance(item, ReferenceCall):
                item.assert_failed("aborted")
                self._count_end(session.key[0], item)
            elif isinstance(item, Fork):
                for child in self._materialize(session, item):
                    child.error = child.error or "aborted"
                    children.append(child)
        del self.sessions[session.key]
        for child in children:
            self._advance(child)

    def _active(self, session: ReferenceSession) -> ReferenceCall | None:
        is_call = session.is_materialized and session.queue and isinstance(session.queue[0], ReferenceCall)
        return session.queue[0] if is_call else None

    def _forget(self, session: ReferenceSession, call: ReferenceCall) -> None:
        session.queue.remove(call)
        self._count_end(session.key[0], call)

    def _count_end(self, client: bytes, call: ReferenceCall) -> None:
        del self.calls[client, call.message.call]
        self.ends[call.end.kind if isinstance(call.end, Failed) else "finished"] += 1

    def _advance(self, session: ReferenceSession) -> None:
        """Runs instructions until a call has not ended."""
        while session.queue and session.is_materialized and self.sessions.get(session.key) is session:
            item = session.queue[0]
            if isinstance(item, ReferenceCall):
                if not self._settle(session, item):
                    return
                continue
            session.queue.popleft()
            if isinstance(item, Append):
                self._append(session, item.token_ids)
            elif isinstance(item, Fork):
                for child in self._materialize(session, item):
                    self._advance(child)
            elif isinstance(item, Close):
                self._remove(session, is_idle=True)

    def _append(self, session: ReferenceSession, token_ids: list[int]) -> None:
        if not token_ids:
            return
        if len(session.text) + len(token_ids) > self.limits.max_length:
            session.error = session.error or "context_overflow"
        elif min(token_ids) < 0 or max(token_ids) >= VOCAB:
            session.error = session.error or "invalid"
        elif session.error is None:
            session.text += token_ids

    # -- calls ----------------------------------------------------------------------------------------

    def _settle(self, session: ReferenceSession, call: ReferenceCall) -> bool:
        """Checks the end of the active call and applies it to the session; False while the call has not ended."""
        refusal = None if call.has_started else self._refusal(session, call.message)
        call.has_started = refusal is None
        if refusal is not None:
            call.assert_failed(*(OUT_OF_TIME if refusal in OUT_OF_TIME else {refusal}))
            assert not call.tokens
            session.error = session.error or refusal
        elif call.end is None:
            return False
        elif isinstance(call.end, Failed):
            self._check_partial(session, call)
            session.text += call.tokens
            constraint = getattr(call.message, "constraint", None)
            is_refused = constraint is not None and constraint not in self.limits.grammars
            allowed = {"constraint"} if is_refused else set()
            allowed |= {"internal"} if call.message.call in self.may_fail else set()
            allowed |= OUT_OF_TIME if call.deadline is not None else set()
            call.assert_failed(*allowed)
            session.error = call.end.kind
        else:
            self._check_finished(session, call)
        self._forget(session, call)
        return True

    def _refusal(self, session: ReferenceSession, message: SessionCall) -> str | None:
        """Why the call cannot start."""
        if session.error is not None:
            return session.error
        room = self.limits.max_length - len(session.text)
        if not session.text:
            return "invalid"
        if isinstance(message, Select):
            choices = message.choices
            if not 0 <= message.replaced <= min(8, len(session.text) - 1) or not choices or not all(choices):
                return "invalid"
            if any(not 0 <= token < VOCAB for choice in choices for token in choice):
                return "invalid"
            return "context_overflow" if max(map(len, choices)) - message.replaced > room else None
        if isinstance(message, Generate):
            if message.sampling.temperature < 0:
                return "invalid"
            return "context_overflow" if message.sampling.max_tokens and room < 1 else None
        return None

    def _check_partial(self, session: ReferenceSession, call: ReferenceCall) -> None:
        """A call that failed has sent the beginning of its output, and a stop string may still have followed."""
        if isinstance(call.message, Generate) and call.tokens:
            expected = self.output(session.text, call.message, cut_at_stop=False)[0]
            assert call.tokens == expected[: len(call.tokens)], (call.tokens, expected)

    def _check_finished(self, session: ReferenceSession, call: ReferenceCall) -> None:
        message, end = call.message, call.end
        assert end.usage.prompt_tokens == end.usage.cached_tokens + end.usage.computed_tokens
        if isinstance(message, Generate):
            expected, reason = self.output(session.text, message)
            assert (call.tokens, end.reason) == (expected, reason), (message, session.text)
            session.text += expected
        elif isinstance(message, Embed):
            vector = logits_after(state_of(session.text)).numpy()[: message.dimensions or VOCAB].astype(np.float64)
            vector /= np.linalg.norm(vector)
            np.testing.assert_allclose(np.frombuffer(end.embedding, "<f4"), vector, atol=1e-5)
        else:
            del session.text[len(session.text) - message.replaced :]
            self._check_select(session.text, message, call)
            session.text += call.tokens

    def _check_select(self, text: list[int], message: Select, call: ReferenceCall) -> None:
        scores = [[logprob(text + c[:j], c[j]) for j in range(len(c))] for c in message.choices]
        choice = call.end.choice
        assert call.tokens == message.choices[choice.index]
        for got, wanted in zip(choice.token_logprobs, scores, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)
        if message.method == "token_length_normalized":
            means = [float(np.mean(values)) for values in scores]
            assert means[choice.index] >= max(means) - 1e-4

    def output(self, text: list[int], message: Generate, cut_at_stop: bool = True) -> tuple[list[int], str]:
        """What a Generate returns: its tokens and its finish reason."""
        params, out = message.sampling, []
        room = min(params.max_tokens, self.limits.max_length - len(text))
        if message.constraint is not None:
            spelled = self.limits.grammars.get(message.constraint, [])
            return spelled[:room], "stop" if room and len(spelled) <= room else "length"
        state = state_of(text)
        while len(out) < room:
            token = self._next_token(state, params, len(out))
            if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
                return out, "stop"
            out.append(token)
            state = state_of([*text, *out])
            if cut_at_stop and (kept := _kept_before_stop(out, params.stop)) is not None:
                return out[:kept], "stop"
        return out, "length"

    @staticmethod
    def _next_token(state: int, params, position: int) -> int:
        logits = logits_after(state).numpy().copy()
        if position < params.min_tokens:
            logits[[EOS, *params.stop_token_ids]] = -np.inf
        if params.is_greedy:
            return int(logits.argmax())
        return NumpyLogitOperations().draw_tokens(logits[None], [DrawState(params, params.seed, position)])[0]


def _kept_before_stop(out: list[int], stops: tuple[str, ...]) -> int | None:
    """The number of tokens before a stop string that the last token completes; None if it completes none."""
    pieces = ["" if token == EOS else LETTERS[token - 1] for token in out]
    text = "".join(pieces)
    if not pieces[-1]:
        return None
    starts = [len(text) - len(stop) for stop in stops if text.endswith(stop)]
    if not starts:
        return None
    ends = np.cumsum([len(piece) for piece in pieces])
    return int((ends <= min(starts)).sum())
