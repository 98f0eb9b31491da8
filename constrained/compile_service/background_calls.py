"""Calls that take too long for whoever polls, made in threads, their results told through a file to poll.

Knows: calls and results. Must not know: grammars. Only calls that give up the interpreter's lock are better off here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


class BackgroundCalls(Generic[Key, Result]):
    """`begin` calls; `collect` what is done. Each call answers under the key that it was begun with.

    >>> aside = Aside[str, int]()                                         # doctest: +SKIP
    >>> aside.begin("a", lambda: 3)                                       # doctest: +SKIP
    >>> aside.collect()                                                      # doctest: +SKIP
    [('a', 3)]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[tuple[Key, Result]] = []
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._is_open = True

    def fileno(self) -> int:
        """Readable when there is something to `collect`."""
        return self._reading

    def begin(self, key: Key, call: Callable[[], Result]) -> None:
        """Make `call`, which must not raise, in a thread of its own."""
        threading.Thread(target=self._run, args=(key, call), daemon=True, name="plait-aside").start()

    def collect(self) -> list[tuple[Key, Result]]:
        """What was done since the last time."""
        with self._lock:
            if self._done:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reading, 1 << 16)
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Close the file; calls that are under way end by themselves, and their results are dropped."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._reading)
                os.close(self._writing)

    def _run(self, key: Key, call: Callable[[], Result]) -> None:
        result = call()
        with self._lock:
            if self._is_open:
                self._done.append((key, result))
                with contextlib.suppress(BlockingIOError):  # full, and so readable
                    os.write(self._writing, b".")
