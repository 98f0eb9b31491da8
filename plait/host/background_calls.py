"""Runs slow calls in threads for a caller with a poll loop: a file descriptor becomes readable when a result is there.

Only calls that release the interpreter lock gain from this. On Linux, where each thread has a priority of its own, they
run at a low one, so that they take little from the caller's threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


class BackgroundCalls(Generic[Key, Result]):
    """Starts calls with `begin` and returns their results from `collect`, each under its key.

    niceness: what is added to that of the caller's threads, on Linux.

    >>> calls = BackgroundCalls[str, int]()                               # doctest: +SKIP
    >>> calls.begin("a", lambda: 3)                                       # doctest: +SKIP
    >>> calls.collect()                                                   # doctest: +SKIP
    [('a', 3)]
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._lock = threading.Lock()
        self._done: list[tuple[Key, Result]] = []
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._is_open = True

    def fileno(self) -> int:
        """Readable when there is something to `collect`."""
        return self._reading

    def begin(self, key: Key, call: Callable[[], Result], more_niceness: int = 0) -> None:
        """Runs `call`, which must not raise, in a new thread, of more niceness than the others on Linux."""
        arguments = (key, call, self._niceness + more_niceness)
        threading.Thread(target=self._run, args=arguments, daemon=True, name="plait-background-call").start()

    def collect(self) -> list[tuple[Key, Result]]:
        """Returns (key, result) of the calls that ended since the last `collect`."""
        with self._lock:
            if self._done:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reading, 1 << 16)
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Closes the file descriptor. Running calls end by themselves; their results are dropped."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._reading)
                os.close(self._writing)

    def _run(self, key: Key, call: Callable[[], Result], niceness: int) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                thread = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
        result = call()
        with self._lock:
            if self._is_open:
                self._done.append((key, result))
                with contextlib.suppress(BlockingIOError):  # the pipe is full, so it is readable already
                    os.write(self._writing, b".")
