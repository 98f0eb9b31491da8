"""Wakes the tasks of an event loop from other threads, many with one call into the loop.

One step of the scheduler answers many calls, and each answer sets an event that some task waits for. However many
events are set between two iterations of the loop, `call_soon_threadsafe` is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from typing import ClassVar, Protocol


class AwaitableEvent(Protocol):
    """What `SingleWaiterEvent` and `asyncio.Event` have in common."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self) -> object: ...


class SingleWaiterEvent:
    """An event for a single waiting task. It costs a third of `asyncio.Event`, which supports many."""

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
        """Waits until the event is set."""
        if self._is_set:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class LoopNotifier:
    """Sets events in the thread of their loop.

    Get it with `for_running_loop()` in a coroutine; `notify` is thread-safe.
    """

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNotifier]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread_id = weakref.ref(loop), threading.get_ident()
        self._pending: deque[AwaitableEvent] = deque()
        self._urgent: deque[AwaitableEvent] = deque()
        self._is_scheduled = False

    @classmethod
    def for_running_loop(cls) -> LoopNotifier:
        """Returns the notifier of the running loop; each loop has one."""
        loop = asyncio.get_running_loop()
        notifier = cls._by_loop.get(loop)
        if notifier is None:
            notifier = cls._by_loop[loop] = cls(loop)
        return notifier

    def notify(self, event: AwaitableEvent, *, is_urgent: bool = False) -> None:
        """Sets `event` in the loop's thread soon. Urgent events are set one iteration of the loop before the others."""
        # Append first, then test the flag. `_set_events` clears the flag first, then reads the queues. So either this
        # thread sees the flag cleared and schedules a call, or the call that is scheduled already sees the event.
        (self._urgent if is_urgent else self._pending).append(event)
        loop = self._loop()
        if not self._is_scheduled and loop is not None:
            self._is_scheduled = True
            is_loop_thread = threading.get_ident() == self._thread_id
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
                (loop.call_soon if is_loop_thread else loop.call_soon_threadsafe)(self._set_events)

    def flush(self) -> None:
        """Sets what waits now instead of in the loop's next iteration. Call it in the loop's thread."""
        if self._urgent or self._pending:
            self._set_events()

    def _set_events(self) -> None:
        self._is_scheduled = False  # before the queues are read, see `notify`
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
    """Waits until `event` is set, at most `seconds` (None: without limit). A timeout sets the event and returns False.

    Unlike `asyncio.wait_for` it creates no task.
    """
    if seconds is None:
        await event.wait()
        return True
    timed_out = False

    def on_timeout() -> None:
        nonlocal timed_out
        timed_out = not event.is_set()
        event.set()

    timer = asyncio.get_running_loop().call_later(max(0.0, seconds), on_timeout)
    try:
        await event.wait()
    finally:
        timer.cancel()
    return not timed_out
