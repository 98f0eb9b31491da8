"""Follows calls from an event loop: what is new in each, without a thread that waits.

Knows: asyncio and how far each call was read. Must not know: channels, detokenizing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from plait.runtime.client.bell import Bell, wait_for_event
from plait.runtime.messages import TokenLogprob


class Place(NamedTuple):
    """How far a call was read: counts of pieces, tokens and logprobs."""

    pieces: int = 0
    tokens: int = 0
    logprobs: int = 0


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


async def follow(
    calls: Sequence[Followed], *, only_ends: bool = False
) -> AsyncGenerator[list[tuple[int, Progress]], None]:
    """Each time something is new: (index of the call, what is new). Every call has one last Progress that `ended`.

    Whether a call failed is for its own `result()` to say. With `only_ends` a call is told of once, whole.
    """
    changed, bell = asyncio.Event(), Bell.here()
    places, open_calls = [Place()] * len(calls), set(range(len(calls)))

    def listener(call: Followed) -> Callable[[], None]:
        def wake() -> None:
            if not only_ends or call.done():
                bell.ring(changed)

        return wake

    listeners = [listener(call) for call in calls]
    for call, wake in zip(calls, listeners, strict=True):
        call.listen(wake)
    try:
        while open_calls:
            changed.clear()
            batch = []
            for index in sorted(open_calls):
                if only_ends and not calls[index].done():
                    continue
                progress, places[index] = calls[index].news(places[index])
                if progress.ended:
                    open_calls.discard(index)
                if progress.ended or progress.token_ids or progress.logprobs:
                    batch.append((index, progress))
            if batch:
                yield batch
            if open_calls and not await wait_for_event(changed, _seconds_left(calls, open_calls)):
                _give_up_late(calls, open_calls)
    finally:
        for call, wake in zip(calls, listeners, strict=True):
            call.unlisten(wake)


def _seconds_left(calls: Sequence[Followed], open_calls: set[int]) -> float | None:
    limits = [at for index in open_calls if (at := calls[index].give_up_at) is not None]
    return min(limits) - time.monotonic() if limits else None


def _give_up_late(calls: Sequence[Followed], open_calls: set[int]) -> None:
    for index in open_calls:
        at = calls[index].give_up_at
        if at is not None and at <= time.monotonic():
            calls[index].give_up()
