"""Streams the updates of calls in an event loop, without a thread per call."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from plait.runtime.messages import TokenLogprob
from plait.runtime.transport.notifier import LoopNotifier, SingleWaiterEvent, wait_for_event


class ReadPosition(NamedTuple):
    """How much of a call has been read."""

    num_pieces: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0


class CallUpdate(NamedTuple):
    """What a call has received since the last read.

    text: whole characters only.
    token_ids: tokens appended to the session's text.
    logprobs: one entry per sampled token.
    finished: this is the last update of the call.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finished: bool


class StreamedCall(Protocol):
    """What `stream_updates` uses of a call."""

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
    """Yields (index of the call, its update) for all calls with news, until every call is done.

    Each call has exactly one update that is `finished`, its last one. With `only_final` there are no others. With
    `raise_on_failure` the CallFailed of a failed call is raised instead of that update; without it, the call's own
    `result()` raises. A call that passes its deadline is expired.
    """
    changed, notifier = SingleWaiterEvent(), LoopNotifier.for_running_loop()
    positions, open_indices = [ReadPosition()] * len(calls), list(range(len(calls)))
    listeners = [_make_listener(call, changed, notifier, only_final) for call in calls]
    for call, listener in zip(calls, listeners, strict=True):
        call.add_listener(listener)
    has_deadlines = any(call.deadline is not None for call in calls)
    try:
        while True:
            changed.clear()
            batch, num_finished = [], 0
            for index in open_indices:
                call = calls[index]
                if only_final and not call.done():
                    continue
                update, positions[index] = call.read_since(positions[index])
                if update.finished:
                    num_finished += 1
                    if raise_on_failure:
                        call.raise_if_failed()
                if update.finished or update.token_ids or update.logprobs:
                    batch.append((index, update))
            if num_finished:
                finished = {index for index, update in batch if update.finished}
                open_indices = [index for index in open_indices if index not in finished]
            if batch:
                yield batch
            if not open_indices:
                return
            if not has_deadlines:
                await changed.wait()
            elif not await wait_for_event(changed, _seconds_to_deadline(calls, open_indices)):
                _expire_overdue(calls, open_indices)
    finally:
        for call, listener in zip(calls, listeners, strict=True):
            call.remove_listener(listener)


def _make_listener(
    call: StreamedCall, changed: SingleWaiterEvent, notifier: LoopNotifier, only_final: bool
) -> Callable[[], None]:
    """Returns a listener that sets `changed`.

    The first update of a call is urgent, to shorten the time to first token.
    """
    is_first = True

    def listener() -> None:
        nonlocal is_first
        if not only_final or call.done():
            notifier.notify(changed, is_urgent=is_first)
            is_first = False

    return listener


def _seconds_to_deadline(calls: Sequence[StreamedCall], open_indices: Sequence[int]) -> float | None:
    deadlines = [deadline for index in open_indices if (deadline := calls[index].deadline) is not None]
    return min(deadlines) - time.monotonic() if deadlines else None


def _expire_overdue(calls: Sequence[StreamedCall], open_indices: Sequence[int]) -> None:
    for index in open_indices:
        deadline = calls[index].deadline
        if deadline is not None and deadline <= time.monotonic():
            calls[index].expire()
