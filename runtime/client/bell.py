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
from typing import ClassVar


class Bell:
    """One per event loop: `Bell.here()` in a coroutine, then `ring(event)` from any thread."""

    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._events: set[asyncio.Event] = set()

    @classmethod
    def here(cls) -> Bell:
        """The bell of the running loop."""
        loop = asyncio.get_running_loop()
        bell = cls._of_loop.get(loop)
        if bell is None:
            bell = cls._of_loop[loop] = cls(loop)
        return bell

    def ring(self, event: asyncio.Event) -> None:
        """Sets `event` in the loop's own thread, soon."""
        with self._lock:
            is_first = not self._events
            self._events.add(event)
        loop = self._loop()
        if is_first and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            events, self._events = self._events, set()
        for event in events:
            event.set()


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits, without a task of its own, until `event` is set; False when `seconds` passed before."""
    if seconds is None:
        await event.wait()
        return True
    late = False

    def ring() -> None:
        nonlocal late
        late = not event.is_set()
        event.set()

    timer = asyncio.get_running_loop().call_later(max(0.0, seconds), ring)
    try:
        await event.wait()
    finally:
        timer.cancel()
    return not late
