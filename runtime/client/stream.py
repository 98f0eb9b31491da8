"""Follows calls from an event loop: what is new in each, without a thread that waits.

Knows: asyncio and how far each call was read. Must not know: channels, detokenizing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from plait.runtime.messages import TokenLogprob
from plait.runtime.transport.notifier import LoopNotifier, SingleWaiterEvent, wait_for_event


class ReadPosition(NamedTuple):
    """How far a call was read: counts of pieces, tokens and logprobs."""

    num_pieces: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0


class CallUpdate(NamedTuple):
    """What is new in a call: whole characters, tokens of the text, logprobs of sampled tokens; `finished`: all is here."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finished: bool


class StreamedCall(Protocol):
    """A call, as seen from here."""

    deadline: float | None

    def add_listener(self, listener: Callable[[], None]) -> None: ...
    def remove_listener(self, listener: Callable[[], None]) -> None: ...
    def read_since(self, since: ReadPosition) -> tuple[CallUpdate, ReadPosition]: ...
    def done(self) -> bool: ...
    def expire(self) -> None: ...
    def raise_if_failed(self) -> None: ...


async def stream_updates(
    calls: Sequence[StreamedCall], *, only_final: bool = False, raise_on_failure: bool = False
) -> AsyncGenerator[list[tuple[int, CallUpdate]], None]:
    """Each time something is new: (index of the call, what is new). Every call has one last Progress that `finished`.

    With `only_final` a call is told of once, whole. With `raise_on_failure` a call that failed raises at its end; without,
    whether it did is for its own `result()` to say.
    """
    changed, notifier = SingleWaiterEvent(), LoopNotifier.for_running_loop()
    places, open_calls = [ReadPosition()] * len(calls), list(range(len(calls)))

    def listener(call: StreamedCall) -> Callable[[], None]:
        is_first = True

        def wake() -> None:
            nonlocal is_first
            if not only_final or call.done():
                notifier.notify(
                    changed, is_urgent=is_first
                )  # a first token goes before the next ones of its neighbours
                is_first = False

        return wake

    listeners = [listener(call) for call in calls]
    for call, wake in zip(calls, listeners, strict=True):
        call.add_listener(wake)
    has_limits = any(call.deadline is not None for call in calls)
    try:
        while True:
            changed.clear()
            batch, num_ended = [], 0
            for index in open_calls:
                call = calls[index]
                if only_final and not call.done():
                    continue
                update, places[index] = call.read_since(places[index])
                if update.finished:
                    num_ended += 1
                    if raise_on_failure:
                        call.raise_if_failed()
                if update.finished or update.token_ids or update.logprobs:
                    batch.append((index, update))
            if num_ended:
                over = {index for index, update in batch if update.finished}
                open_calls = [index for index in open_calls if index not in over]
            if batch:
                yield batch
            if not open_calls:
                return
            if not has_limits:
                await changed.wait()
            elif not await wait_for_event(changed, _seconds_to_deadline(calls, open_calls)):
                _expire_overdue(calls, open_calls)
    finally:
        for call, wake in zip(calls, listeners, strict=True):
            call.remove_listener(wake)


def _seconds_to_deadline(calls: Sequence[StreamedCall], open_calls: Sequence[int]) -> float | None:
    limits = [at for index in open_calls if (at := calls[index].deadline) is not None]
    return min(limits) - time.monotonic() if limits else None


def _expire_overdue(calls: Sequence[StreamedCall], open_calls: Sequence[int]) -> None:
    for index in open_calls:
        at = calls[index].deadline
        if at is not None and at <= time.monotonic():
            calls[index].expire()
