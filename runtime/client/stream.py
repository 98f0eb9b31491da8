"""Streams the updates of calls in an event loop, without a thread per call."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plait.runtime.call_reports import TokenLogprob, decode_logprobs
from plait.runtime.errors import Aborted
from plait.runtime.transport.notifier import LoopNotifier, SingleWaiterEvent, wait_for_event

if TYPE_CHECKING:
    from plait.runtime.client.call import Call

MAX_MESSAGES_PER_UPDATE = 64  # of a stream with a limit
UNREAD_STREAM = "the client did not read its stream, and too much of it was waiting"


class ReadPosition(NamedTuple):
    """How much of a call has been read."""

    num_pieces: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0


class CallUpdate(NamedTuple):
    """What a call has received since the last read.

    text: whole characters only.
    token_ids: tokens appended to the session's text.
    encoded_logprobs: `logprobs` of each message, in MessagePack.
    finished: this is the last update of the call.
    """

    text: str
    token_ids: list[int]
    encoded_logprobs: Sequence[bytes]
    finished: bool

    def logprobs(self) -> list[TokenLogprob]:
        """One entry per sampled token. Decodes them."""
        return decode_logprobs(self.encoded_logprobs)


async def stream_updates(
    calls: Sequence[Call],
    *,
    only_final: bool = False,
    raise_on_failure: bool = False,
    max_unread_bytes: int | None = None,
) -> AsyncGenerator[list[tuple[int, CallUpdate]], None]:
    """Yields (index of the call, its update) for all calls with news, until every call is done.

    Each call has exactly one update that is `finished`, its last one. With `only_final` there are no others. With
    `raise_on_failure` the CallFailed of a failed call is raised instead of that update; without it, the call's own
    `result()` raises. A call that passes its deadline is expired.

    max_unread_bytes: for a reader that may stop. Above it, summed over all calls, the calls with the most unread
    bytes are aborted. Updates then have at most 64 messages with logprobs, and logprobs that were read are freed.
    """
    changed, notifier = SingleWaiterEvent(), LoopNotifier.for_running_loop()
    positions, open_indices = [ReadPosition()] * len(calls), list(range(len(calls)))
    reading = _Reading(calls, max_unread_bytes)
    listeners = [
        _make_listener(call, changed, notifier, only_final, reading.checks(index)) for index, call in enumerate(calls)
    ]
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
                update, positions[index] = reading.read(index, positions[index])
                if update.finished:
                    num_finished += 1
                    if raise_on_failure:
                        call.raise_if_failed()
                if update.finished or update.token_ids or update.encoded_logprobs:
                    batch.append((index, update))
            if num_finished:
                finished = {index for index, update in batch if update.finished}
                open_indices = [index for index in open_indices if index not in finished]
            if batch:
                yield batch
            if not open_indices:
                return
            if reading.has_more:
                continue
            if not has_deadlines:
                await changed.wait()
            elif not await wait_for_event(changed, _seconds_to_deadline(calls, open_indices)):
                _expire_overdue(calls, open_indices)
    finally:
        for call, listener in zip(calls, listeners, strict=True):
            call.remove_listener(listener)


class _Reading:
    """Reads the calls of one stream. `has_more`: the last round left something unread."""

    def __init__(self, calls: Sequence[Call], max_unread_bytes: int | None) -> None:
        self._calls, self._max_unread_bytes = calls, max_unread_bytes
        self._num_read_bytes = [0] * len(calls)
        self._has_more = [False] * len(calls)

    @property
    def has_more(self) -> bool:
        return self._max_unread_bytes is not None and any(self._has_more)

    def read(self, index: int, since: ReadPosition) -> tuple[CallUpdate, ReadPosition]:
        """Reads what has arrived, or a part of it."""
        call = self._calls[index]
        if self._max_unread_bytes is None:
            return call.read_since(since)
        num_received_bytes = call.num_received_bytes
        max_messages = max(1, MAX_MESSAGES_PER_UPDATE // len(self._calls))
        update, position = call.read_since(since, max_messages=max_messages, forget_logprobs=True)
        self._has_more[index] = not update.finished and position.num_pieces - since.num_pieces == max_messages
        if not self._has_more[index]:
            self._num_read_bytes[index] = num_received_bytes
        return update, position

    def checks(self, index: int) -> Callable[[], None]:
        """Returns a function that aborts a call of which too much is unread."""
        call, limit = self._calls[index], self._max_unread_bytes
        if limit is None:
            return lambda: None
        share = limit // len(self._calls)

        def check() -> None:
            if self._num_unread_bytes(index) > share and self._is_over(limit) and not call.done():
                call.abort()
                call.on_failed(Aborted(UNREAD_STREAM))

        return check

    def _num_unread_bytes(self, index: int) -> int:
        return self._calls[index].num_received_bytes - self._num_read_bytes[index]

    def _is_over(self, limit: int) -> bool:
        return sum(map(self._num_unread_bytes, range(len(self._calls)))) > limit


def _make_listener(
    call: Call,
    changed: SingleWaiterEvent,
    notifier: LoopNotifier,
    only_final: bool,
    check_unread: Callable[[], None],
) -> Callable[[], None]:
    """Returns a listener that calls `check_unread` and sets `changed`.

    The first update of a call is urgent, to shorten the time to first token.
    """
    is_first = True

    def listener() -> None:
        nonlocal is_first
        check_unread()
        if not only_final or call.done():
            notifier.notify(changed, is_urgent=is_first)
            is_first = False

    return listener


def _seconds_to_deadline(calls: Sequence[Call], open_indices: Sequence[int]) -> float | None:
    deadlines = [deadline for index in open_indices if (deadline := calls[index].deadline) is not None]
    return min(deadlines) - time.monotonic() if deadlines else None


def _expire_overdue(calls: Sequence[Call], open_indices: Sequence[int]) -> None:
    for index in open_indices:
        deadline = calls[index].deadline
        if deadline is not None and deadline <= time.monotonic():
            calls[index].expire()
