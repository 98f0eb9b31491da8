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


class Settable(Protocol):
    """A `Signal` or an `asyncio.Event`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self) -> object: ...


class Signal:
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


class Bell:
    """One per event loop: `Bell.here()` in a coroutine, then `ring(event)` from any thread, its own or another."""

    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread_id = weakref.ref(loop), threading.get_ident()
        self._rung: deque[Settable] = deque()
        self._urgent: deque[Settable] = deque()
        self._is_called = False

    @classmethod
    def here(cls) -> Bell:
        """The bell of the running loop."""
        loop = asyncio.get_running_loop()
        bell = cls._of_loop.get(loop)
        if bell is None:
            bell = cls._of_loop[loop] = cls(loop)
        return bell

    def ring(self, event: Settable, *, is_urgent: bool = False) -> None:
        """Sets `event` in the loop's own thread, soon; an urgent one a turn of the loop before what is not."""
        (self._urgent if is_urgent else self._rung).append(event)  # before the look: whoever finds the call made
        loop = self._loop()  #                                        has left its event where it will be found
        if not self._is_called and loop is not None:
            self._is_called = True
            is_here = threading.get_ident() == self._thread_id
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                (loop.call_soon if is_here else loop.call_soon_threadsafe)(self._set)

    def _set(self) -> None:
        self._is_called = False  # before the look, for the same reason
        if self._urgent:
            while self._urgent:
                self._urgent.popleft().set()
            if self._rung and not self._is_called:
                self._is_called = True
                asyncio.get_running_loop().call_soon(self._set)
            return
        while self._rung:
            self._rung.popleft().set()


async def wait_for_event(event: Settable, seconds: float | None) -> bool:
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
