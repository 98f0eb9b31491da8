"""One generate, select or embed request in flight: the only place where a program waits for the runtime."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from plait.constrained.specs import Spec
from plait.runtime.call_reports import (
    CacheMiss,
    ChoiceScores,
    ExactInfo,
    ParticlesInfo,
    TokenLogprob,
    Usage,
    decode_logprobs,
)
from plait.runtime.client.stream import CallUpdate, ReadPosition, stream_updates
from plait.runtime.errors import CallFailed, DeadlineExceeded
from plait.runtime.messages import Finished, FinishReason
from plait.runtime.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MESSAGE_BYTES, TOKEN_BYTES = 256, 48  # estimated memory of a message's text and times, and of a token id
_encode = msgspec.msgpack.Encoder().encode
_NO_LOGPROBS = _encode([])

DEADLINE_GRACE_S = 1.0  # how long a call waits after its deadline for the scheduler to report it


class _PromptLogprobs:
    """The field `CallResult.prompt_logprobs`. What a message has of them in parts is decoded at the first access."""

    def __get__(self, result: CallResult | None, owner: type[CallResult]) -> list[TokenLogprob] | None:
        if result is None:
            return None  # the default value of the field
        value = result.__dict__["_prompt_logprobs"]
        if value and isinstance(value[0], msgspec.Raw):
            value = result.__dict__["_prompt_logprobs"] = decode_logprobs(value)
        return value  # type: ignore[no-any-return]

    def __set__(self, result: CallResult, value: list[TokenLogprob] | list[msgspec.Raw] | None) -> None:
        result.__dict__["_prompt_logprobs"] = value


@dataclass(frozen=True)
class CallResult:
    """The value of a finished call.

    text: the generated text, without the stop string that ended it; of a select, the chosen text.
    token_ids: the tokens that were appended to the session's text.
    encoded_logprobs: the `logprobs` of each message from the runtime, in MessagePack: a tenth of their size as objects.
    lenient_constraint: the constraint of the call, if it was lenient; see `violation`.
    embedding_bytes: the vector of an embed call, float32, little-endian.
    warnings: what the constraint of the call does not enforce; see `Grammar.warnings`.
    exact, particles: how the value was drawn, for a call with `SamplingParams.exact` or `particles`.
    cache_miss: where and why the prompt parted from the prefix cache.
    extra_meta: what another service says about the call, or a gen of several calls about them.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    matched: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    encoded_logprobs: Sequence[bytes] | None = None
    choice: ChoiceScores | None = None
    prompt_logprobs: _PromptLogprobs = _PromptLogprobs()
    lenient_constraint: Spec | None = None
    embedding_bytes: bytes | None = None
    warnings: tuple[str, ...] = ()
    exact: ExactInfo | None = None
    particles: ParticlesInfo | None = None
    cache_miss: CacheMiss | None = None
    extra_meta: dict[str, Any] | None = None

    @cached_property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry per sampled token: more than `token_ids` if a stop string was cut off."""
        return None if self.encoded_logprobs is None else decode_logprobs(self.encoded_logprobs)

    @cached_property
    def embedding(self) -> npt.NDArray[np.float32]:
        """The vector of an embed call: [dimensions] float32, read-only. Empty for other calls."""
        import numpy as np

        return np.frombuffer(self.embedding_bytes or b"", dtype="<f4")

    @cached_property
    def violation(self) -> str | None:
        """The reason why the text violates its lenient constraint, in one line.

        None if it does not, or if the call has no such constraint. The first access validates the text.
        """
        if self.lenient_constraint is None:
            return None
        from plait.constrained.validation_process import validation_error  # on demand: few programs need it

        return validation_error(self.lenient_constraint, self.text)


@dataclass(frozen=True)
class ScoredChoices:
    """The choices of a select, and their token ids, which may replace the last tokens of the text before them."""

    choices: tuple[str, ...]
    token_ids: list[list[int]]


class Call:
    """A request in flight. `result`, `aresult`, `iter_text` and `aiter_text` wait; all other methods return at once.

    >>> call = session.generate(sampling_params(max_tokens=8))     # doctest: +SKIP
    >>> for piece in call.iter_text(): print(piece, end="")        # doctest: +SKIP
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
        self._pieces: list[str] = []  # one text per message
        self._token_ids: list[int] = []
        self._logprobs: list[bytes] | None = None  # one entry per message, in MessagePack
        self.num_received_bytes = 0  # estimated memory of the messages
        self._result: CallResult | None = None
        self._error: CallFailed | None = None
        self._listeners: list[Callable[[], None]] = []
        self._arrivals: list[tuple[float, int]] = []  # (monotonic time, number of tokens) per message

    # -- called by the client for each reply ------------------------------------------------------

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        with self._lock:
            self._token_ids.extend(token_ids)
            self.num_received_bytes += MESSAGE_BYTES + TOKEN_BYTES * len(token_ids)
            if logprobs or self._logprobs is not None:
                self._add_logprobs(logprobs or [])
            self._arrivals.append((time.monotonic(), len(token_ids)))
            piece = self._detokenizer.push(token_ids)
            if self.scored_choices is None:  # `on_finished` appends the text of the choice
                self._pieces.append(piece)
            self._notify()

    def _add_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        if self._logprobs is None:
            self._logprobs = [_NO_LOGPROBS] * len(self._arrivals)
        self._logprobs.append(_encode(logprobs))
        self.num_received_bytes += len(self._logprobs[-1])

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
                encoded_logprobs=self._logprobs,
                choice=message.choice,
                prompt_logprobs=message.prompt_logprobs,
                lenient_constraint=self._lenient_constraint,
                embedding_bytes=message.embedding,
                warnings=message.warnings,
                exact=message.exact,
                particles=message.particles,
                cache_miss=message.cache_miss,
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

    # -- used by `stream_updates` -----------------------------------------------------------------

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every update, in the thread that delivers replies."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def raise_if_failed(self) -> None:
        """Raises the call's CallFailed, if it has failed."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def read_since(
        self, since: ReadPosition, *, max_messages: int | None = None, forget_logprobs: bool = False
    ) -> tuple[CallUpdate, ReadPosition]:
        """Returns what has arrived after `since`, and the new position.

        max_messages: the most messages to read at once of a call with logprobs. forget_logprobs: frees the logprobs
        that are read.
        """
        with self._lock:
            logprobs = self._logprobs or []
            end = ReadPosition(len(self._pieces), len(self._token_ids), len(logprobs))
            is_last = max_messages is None or not logprobs or end.num_pieces - since.num_pieces <= max_messages
            if not is_last:
                assert max_messages is not None
                num_messages = since.num_pieces + max_messages
                num_tokens = sum(count for _, count in self._arrivals[since.num_pieces : num_messages])
                end = ReadPosition(num_messages, since.num_tokens + num_tokens, num_messages)
            new_logprobs = logprobs[since.num_logprobs : end.num_logprobs]
            if forget_logprobs:
                logprobs[since.num_logprobs : end.num_logprobs] = [_NO_LOGPROBS] * len(new_logprobs)
            text = "".join(self._pieces[since.num_pieces : end.num_pieces])
            token_ids = self._token_ids[since.num_tokens : end.num_tokens]
            return CallUpdate(text, token_ids, new_logprobs, is_last and self.done()), end

    # -- public -----------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens received so far."""
        return len(self._token_ids)

    @property
    def first_token_time(self) -> float | None:
        """The time.monotonic() at which the first token arrived; None before, and for calls without tokens."""
        return self._arrivals[0][0] if self._arrivals else None

    @property
    def usage(self) -> Usage | None:
        """The cost of the finished call; None while it runs and if it has failed."""
        return None if self._result is None else self._result.usage

    @property
    def failure(self) -> CallFailed | None:
        """The error of a failed call; None otherwise."""
        return self._error

    def inter_token_gaps(self) -> list[tuple[float, int]]:
        """Returns (seconds since the previous message, number of tokens) for each message with tokens but the first."""
        arrivals = self._arrivals[: len(self._arrivals)]
        return [(time - previous, count) for (previous, _), (time, count) in itertools.pairwise(arrivals) if count]

    def done(self) -> bool:
        """Returns whether the call has a result or an error."""
        return self._result is not None or self._error is not None

    def result(self, timeout_s: float | None = None) -> CallResult:
        """Waits for the value.

        Raises the call's CallFailed, or DeadlineExceeded after `timeout_s` seconds of waiting.
        """
        with self._changed:
            self._wait(self.done, timeout_s)
            return self._value()

    def iter_text(self) -> Iterator[str]:
        """Yields the text as it arrives, in whole characters, then raises CallFailed if the call has failed."""
        num_read = 0
        for _ in self._iter_changes(lambda: len(self._pieces)):
            new_pieces = self._pieces[num_read:]
            num_read += len(new_pieces)
            yield from filter(None, new_pieces)
        self._value()

    def text_so_far(self) -> str:
        """Returns the text that has arrived. Does not wait."""
        with self._lock:
            return "".join(self._pieces)

    def iter_progress(self) -> Iterator[None]:
        """Yields whenever tokens have arrived, and once at the end. Raises CallFailed if the call has failed."""
        for is_done in self._iter_changes(lambda: len(self._token_ids) + len(self._pieces)):
            if is_done:
                self._value()
            yield

    def _iter_changes(self, count: Callable[[], int]) -> Iterator[bool]:
        """Yields whenever `count()` has risen, and when the call is done, at last: whether it is."""
        num_seen, is_done = 0, False

        def has_changed() -> bool:
            return count() > num_seen or self.done()

        while not is_done:
            with self._changed:
                self._wait(has_changed, None)
                num_seen, is_done = count(), self.done()
            yield is_done

    async def aiter_progress(self) -> AsyncIterator[None]:
        """`iter_progress()` for an event loop."""
        async for _ in stream_updates([self], raise_on_failure=True):
            yield

    async def aiter_text(self) -> AsyncIterator[str]:
        """`iter_text()` for an event loop; it occupies no thread."""
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
        """Aborts the call, which frees its KV pages; later reads raise Aborted."""
        if not self.done():
            self._cancel()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits until `ready()`. The caller holds `_changed`.

        Raises DeadlineExceeded if the caller's `timeout_s` passes first. Fails the call if its own deadline does.
        """
        remaining = None if self.deadline is None else self.deadline - time.monotonic()
        limits = [max(0.0, limit) for limit in (remaining, timeout_s) if limit is not None]
        if self._changed.wait_for(ready, min(limits, default=None)):
            return
        if remaining is not None and (timeout_s is None or remaining <= timeout_s):
            self.expire()
        else:
            raise DeadlineExceeded(
                "the call did not finish within the timeout of this read; it is still running (abort() ends it)"
            )

    def expire(self) -> None:
        """Aborts the call and fails it here, because the scheduler has not reported that its deadline passed."""
        self._cancel()
        self.on_failed(DeadlineExceeded("the call's timeout passed and the runtime did not answer"))

    def _value(self) -> CallResult:
        self.raise_if_failed()
        assert self._result is not None
        return self._result
