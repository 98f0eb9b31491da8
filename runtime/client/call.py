"""A call in flight: the one place where a program waits for the runtime.

Knows: pieces of text, results, and waiting (in threads and on an event loop).
Must not know: sockets, or what the call is about beyond its name.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from plait.constrained.specs import Spec
from plait.runtime.client.stream import CallUpdate, ReadPosition, stream_updates
from plait.runtime.errors import CallFailed, DeadlineExceeded
from plait.runtime.messages import ChoiceScores, Finished, FinishReason, TokenLogprob, Usage
from plait.runtime.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEADLINE_GRACE_S = 1.0  # how long after a call's deadline the scheduler may still report it itself


@dataclass(frozen=True)
class CallResult:
    """What a finished call gives. `text` never holds the stop string that ended it.

    `token_ids` are the tokens that stand in the session's text; `logprobs` those that were sampled, which are
    more where a stop string was cut off. `lenient_constraint` is the lenient constraint that the value was sampled under.
    `embedding_bytes`: what an embedding is, float32, little-endian.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    matched: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    choice: ChoiceScores | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    lenient_constraint: Spec | None = None
    embedding_bytes: bytes | None = None

    @cached_property
    def embedding(self) -> npt.NDArray[np.float32]:
        """[dimensions] float32, read-only, of an embedding's call; empty for another."""
        import numpy as np

        return np.frombuffer(self.embedding_bytes or b"", dtype="<f4")

    @cached_property
    def violation(self) -> str | None:
        """Why the text is not what a lenient constraint asks for, in one line; None where it is, or none was given.

        A full validator reads the text when this is first asked for.
        """
        if self.lenient_constraint is None:
            return None
        from plait.constrained.full_validation import validation_error  # a validator that few programs need

        return validation_error(self.lenient_constraint, self.text)


@dataclass(frozen=True)
class ScoredChoices:
    """What a select chooses from: the texts, and the tokens of each, which may begin in the text before them."""

    choices: tuple[str, ...]
    token_ids: list[list[int]]


class Call:
    """One Generate, Select or Embed on its way. Reading waits; nothing else does.

    >>> call = session.generate(sampling_params(max_tokens=8))     # doctest: +SKIP
    >>> for piece in call.pieces(): print(piece, end="")           # doctest: +SKIP
    >>> call.result().usage.cached_tokens                          # doctest: +SKIP
    """

    def __init__(
        self,
        call_id: int,
        detokenizer: Detokenizer,
        cancel: Callable[[], None],
        timeout_s: float | None = None,
        lenient_constraint: Spec | None = None,
        scored_choices: ScoredChoices | None = None,
    ) -> None:
        self.call_id = call_id
        self.started = time.monotonic()
        self._detokenizer = detokenizer
        self._cancel = cancel
        self._lenient_constraint = lenient_constraint
        self.scored_choices = scored_choices
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s + DEADLINE_GRACE_S
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._result: CallResult | None = None
        self._error: CallFailed | None = None
        self._listeners: list[Callable[[], None]] = []
        self._arrivals: list[tuple[float, int]] = []  # (when, how many) of tokens

    # -- what the channel's side calls ------------------------------------------------------------

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        with self._lock:
            self._token_ids.extend(token_ids)
            self._arrivals.append((time.monotonic(), len(token_ids)))
            if logprobs:
                self._logprobs = self._logprobs or []
                self._logprobs.extend(logprobs)
            piece = self._detokenizer.push(token_ids)
            if piece and self.scored_choices is None:  # a choice's text comes with its end
                self._pieces.append(piece)
            self._notify()

    def on_finished(self, message: Finished) -> None:
        with self._lock:
            if self.scored_choices is not None and message.choice is not None:
                self._pieces.append(self.scored_choices.choices[message.choice.index])
            self._result = CallResult(
                text="".join(self._pieces),
                finish_reason=message.reason,
                usage=message.usage,
                matched=message.matched,
                token_ids=self._token_ids,
                logprobs=self._logprobs,
                choice=message.choice,
                prompt_logprobs=message.prompt_logprobs,
                lenient_constraint=self._lenient_constraint,
                embedding_bytes=message.embedding,
            )
            self._notify()

    def on_failed(self, error: CallFailed) -> None:
        with self._lock:
            if self._result is None and self._error is None:
                self._error = error
                self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    # -- what `stream_updates` needs ----------------------------------------------------------------------

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Has `listener` called, in the channel's thread, whenever something is new."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def raise_if_failed(self) -> None:
        """Raises the CallFailed of a call that failed; nothing for another."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def read_since(self, since: ReadPosition) -> tuple[CallUpdate, ReadPosition]:
        """What came after `since`, and the place after it."""
        with self._lock:
            text, token_ids = "".join(self._pieces[since.num_pieces :]), self._token_ids[since.num_tokens :]
            logprobs = self._logprobs or []
            here = ReadPosition(len(self._pieces), len(self._token_ids), len(logprobs))
            return CallUpdate(text, token_ids, logprobs[since.num_logprobs :], self.done()), here

    # -- what a program calls ---------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens that have come so far."""
        return len(self._token_ids)

    @property
    def usage(self) -> Usage | None:
        """What it cost; None while it runs and where it failed."""
        return None if self._result is None else self._result.usage

    @property
    def failure(self) -> CallFailed | None:
        """Why the call failed; None while it runs and where it did not."""
        return self._error

    def inter_token_gaps(self) -> list[tuple[float, int]]:
        """(seconds since the tokens before came, how many came together) for all that followed the first ones."""
        arrivals = self._arrivals[: len(self._arrivals)]
        return [(at - before, count) for (before, _), (at, count) in itertools.pairwise(arrivals) if count]

    def done(self) -> bool:
        """True once a result or an error is there."""
        return self._result is not None or self._error is not None

    def result(self, timeout_s: float | None = None) -> CallResult:
        """Waits for the value. Raises the call's CallFailed, or DeadlineExceeded after `timeout_s` seconds."""
        with self._changed:
            self._wait(self.done, timeout_s)
            return self._value()

    def iter_text(self, timeout_s: float | None = None) -> Iterator[str]:
        """The text as it comes, in pieces of whole characters; raises at its end if the call failed."""
        at, until = 0, None if timeout_s is None else time.monotonic() + timeout_s

        def has_news() -> bool:
            return len(self._pieces) > at or self.done()

        while True:
            with self._changed:
                self._wait(has_news, None if until is None else until - time.monotonic())
                fresh, at = self._pieces[at:], len(self._pieces)
                ended = self.done()
            yield from fresh
            if ended:
                self._value()
                return

    async def aiter_text(self) -> AsyncIterator[str]:
        """`iter_text()` for an event loop: waits without holding a thread."""
        async for batch in stream_updates([self]):
            for _, update in batch:
                if update.text:
                    yield update.text
        self._value()

    async def aresult(self) -> CallResult:
        """`result()` for an event loop."""
        async for _ in stream_updates([self], only_final=True):
            pass
        return self._value()

    def abort(self) -> None:
        """Ends the call at once and frees its pages; a later read raises Aborted."""
        if not self.done():
            self._cancel()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits, `_changed` held, for `ready()`, the caller's own `timeout_s`, or the call's deadline."""
        remaining = None if self.deadline is None else self.deadline - time.monotonic()
        limits = [max(0.0, limit) for limit in (remaining, timeout_s) if limit is not None]
        if self._changed.wait_for(ready, min(limits, default=None)):
            return
        if remaining is not None and (timeout_s is None or remaining <= timeout_s):
            self.expire()
        else:
            raise DeadlineExceeded("no answer in the time given to this read (the call goes on; abort() ends it)")

    def expire(self) -> None:
        """The deadline is past and the scheduler, which should have said so, is silent."""
        self._cancel()
        self.on_failed(DeadlineExceeded("the call's timeout passed and the runtime did not answer"))

    def _value(self) -> CallResult:
        self.raise_if_failed()
        assert self._result is not None
        return self._result
