"""Follows calls from an event loop: what is new in each, without a thread that waits.

Knows: asyncio and how far each call was read. Must not know: channels, detokenizing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from plait.runtime.client.bell import Bell, Signal, wait_for_event
from plait.runtime.messages import TokenLogprob


class Place(NamedTuple):
    """How far a call was read: counts of pieces, tokens and logprobs."""

    num_pieces: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0


class Progress(NamedTuple):
    """What is new in a call: whole characters, tokens of the text, logprobs of sampled tokens; `ended`: all is here."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    ended: bool


class Followed(Protocol):
    """A call, as seen from here."""

    give_up_at: float | None

    def listen(self, listener: Callable[[], None]) -> None: ...
    def unlisten(self, listener: Callable[[], None]) -> None: ...
    def news(self, since: Place) -> tuple[Progress, Place]: ...
    def done(self) -> bool: ...
    def give_up(self) -> None: ...
    def raise_failure(self) -> None: ...


async def follow(
    calls: Sequence[Followed], *, only_ends: bool = False, raises: bool = False
) -> AsyncGenerator[list[tuple[int, Progress]], None]:
    """Each time something is new: (index of the call, what is new). Every call has one last Progress that `ended`.

    With `only_ends` a call is told of once, whole. With `raises` a call that failed raises at its end; without,
    whether it did is for its own `result()` to say.
    """
    changed, bell = Signal(), Bell.here()
    places, open_calls = [Place()] * len(calls), list(range(len(calls)))

    def listener(call: Followed) -> Callable[[], None]:
        is_first = True

        def wake() -> None:
            nonlocal is_first
            if not only_ends or call.done():
                bell.ring(changed, is_urgent=is_first)  # a first token goes before the next ones of its neighbours
                is_first = False

        return wake

    listeners = [listener(call) for call in calls]
    for call, wake in zip(calls, listeners, strict=True):
        call.listen(wake)
    has_limits = any(call.give_up_at is not None for call in calls)
    try:
        while True:
            changed.clear()
            batch, num_ended = [], 0
            for index in open_calls:
                call = calls[index]
                if only_ends and not call.done():
                    continue
                progress, places[index] = call.news(places[index])
                if progress.ended:
                    num_ended += 1
                    if raises:
                        call.raise_failure()
                if progress.ended or progress.token_ids or progress.logprobs:
                    batch.append((index, progress))
            if num_ended:
                over = {index for index, progress in batch if progress.ended}
                open_calls = [index for index in open_calls if index not in over]
            if batch:
                yield batch
            if not open_calls:
                return
            if not has_limits:
                await changed.wait()
            elif not await wait_for_event(changed, _seconds_left(calls, open_calls)):
                _give_up_late(calls, open_calls)
    finally:
        for call, wake in zip(calls, listeners, strict=True):
            call.unlisten(wake)


def _seconds_left(calls: Sequence[Followed], open_calls: Sequence[int]) -> float | None:
    limits = [at for index in open_calls if (at := calls[index].give_up_at) is not None]
    return min(limits) - time.monotonic() if limits else None


def _give_up_late(calls: Sequence[Followed], open_calls: Sequence[int]) -> None:
    for index in open_calls:
        at = calls[index].give_up_at
        if at is not None and at <= time.monotonic():
            calls[index].give_up()
