"""Faults of ours that ended one request, for the log: each whole once, and after that how often it happened.

What one client can cause it can cause a thousand times a second, and a log must not be what stops its neighbours.

Knows: exceptions, standard error. Must not know: requests, sessions.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter


class ErrorLog:
    """Counts by the kind of the error and the line that raised it."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def record(self, error: BaseException) -> None:
        """Writes the traceback the first time, then one line at the 10th, the 100th, ..."""
        name, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
        place = (name, frames[-1].filename, frames[-1].lineno or 0) if frames else (name, "", 0)
        self._counts[place] += 1
        count = self._counts[place]
        if count == 1:
            traceback.print_exception(error, file=sys.stderr)
        elif str(count).strip("0") == "1":
            print(f"{name} at {place[1]}:{place[2]}: {count} times so far", file=sys.stderr, flush=True)
