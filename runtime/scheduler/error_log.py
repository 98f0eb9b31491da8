"""Logs internal errors that ended one request, and warnings: the first time in full, repetitions only as counts.

A client can cause the same error a thousand times a second; writing each one would slow down the other clients.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

MAX_WARNED = 1000  # different warnings; a client can invent any number
MAX_WARNING_CHARS = 1000


class ErrorLog:
    """Counts errors by exception type and by the line that raised it. `write` takes the lines."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self.write: Callable[[str], object] = _print

    def record(self, error: BaseException) -> None:
        """Writes the traceback the first time, then one line at the 10th, 100th, ... time."""
        name, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
        key = (name, frames[-1].filename, frames[-1].lineno or 0) if frames else (name, "", 0)
        self._counts[key] += 1
        count = self._counts[key]
        if count == 1:
            self.write("".join(traceback.format_exception(error)))
        elif str(count).strip("0") == "1":
            self.write(f"{name} at {key[1]}:{key[2]}: {count} times so far\n")

    def warn(self, warnings: Sequence[str]) -> None:
        """Writes one line for the warnings of a constraint, the first time that they occur."""
        line = f"warning: {'; '.join(warnings)}"[:MAX_WARNING_CHARS]
        if line not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(line)
            self.write(f"{line}\n")


def _print(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
