"""Wakes the tasks of an event loop from other threads, many at once.

A step of the scheduler answers many calls. Each answer sets an event of some task; however many come between two turns
of the loop, the loop is called once.

Knows: asyncio. Must not know: calls, channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from typing import ClassVar, Protocol


class AwaitableEvent(Protocol):
    """A `SingleWaiterEvent` or an `asyncio.Event`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self) -> object: ...


class SingleWaiterEvent:
    """An event that one task waits for. It costs a third of what `asyncio.Event` does, which may have many."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    async def wait(self) -> None:
        """Returns at once where it is set."""
        if self._is_set:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class LoopNotifier:
    """One per event loop: `LoopNotifier.for_running_loop()` in a coroutine, then `notify(event)` from any thread, its own or another."""

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNotifier]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread_id = weakref.ref(loop), threading.get_ident()
        self._pending: deque[AwaitableEvent] = deque()
        self._urgent: deque[AwaitableEvent] = deque()
        self._is_scheduled = False

    @classmethod
    def for_running_loop(cls) -> LoopNotifier:
        """The bell of the running loop."""
        loop = asyncio.get_running_loop()
        notifier = cls._by_loop.get(loop)
        if notifier is None:
            notifier = cls._by_loop[loop] = cls(loop)
        return notifier

    def notify(self, event: AwaitableEvent, *, is_urgent: bool = False) -> None:
        """Sets `event` in the loop's own thread, soon; an urgent one a turn of the loop before what is not."""
        (self._urgent if is_urgent else self._pending).append(event)  # before the look: whoever finds the call made
        loop = self._loop()  #                                        has left its event where it will be found
        if not self._is_scheduled and loop is not None:
            self._is_scheduled = True
            is_loop_thread = threading.get_ident() == self._thread_id
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                (loop.call_soon if is_loop_thread else loop.call_soon_threadsafe)(self._set_events)

    def _set_events(self) -> None:
        self._is_scheduled = False  # before the look, for the same reason
        if self._urgent:
            while self._urgent:
                self._urgent.popleft().set()
            if self._pending and not self._is_scheduled:
                self._is_scheduled = True
                asyncio.get_running_loop().call_soon(self._set_events)
            return
        while self._pending:
            self._pending.popleft().set()


async def wait_for_event(event: AwaitableEvent, seconds: float | None) -> bool:
    """Waits, without a task of its own, until `event` is set; False when `seconds` passed before."""
    if seconds is None:
        await event.wait()
        return True
    late = False

    def on_timeout() -> None:
        nonlocal late
        late = not event.is_set()
        event.set()

    timer = asyncio.get_running_loop().call_later(max(0.0, seconds), on_timeout)
    try:
        await event.wait()
    finally:
        timer.cancel()
    return not late
