"""Finds stop strings in a growing byte stream, across token borders.

One Knuth-Morris-Pratt automaton per stop string, so that the cost is one small step per byte and stop string,
whatever the strings are. Knows: bytes. Must not know: tokens or sessions.
"""

from __future__ import annotations

from typing import NamedTuple


class StopHit(NamedTuple):
    """The stop string that was completed first, and the byte offset at which it begins."""

    text: str
    start: int


class StopScanner:
    """Feed it the output's bytes; `num_safe` bytes can no longer be cut off by a stop string.

    >>> scanner = StopScanner(("END",))
    >>> scanner.push(b"the E"), scanner.num_safe
    (None, 4)
    >>> scanner.push(b"NDING")
    StopHit(text='END', start=4)
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [(text, text.encode(), _failure_table(text.encode())) for text in stops]
        self._matched = [0] * len(stops)  # length of the longest prefix of each that ends the stream
        self._length = 0

    @property
    def num_safe(self) -> int:
        return self._length - max(self._matched, default=0)

    def push(self, data: bytes) -> StopHit | None:
        """The first stop string completed by `data`, the longest where several end together; else None."""
        if not self._stops:
            self._length += len(data)
            return None
        for byte in data:
            self._length += 1
            hit: StopHit | None = None
            for i, (text, pattern, table) in enumerate(self._stops):
                state = self._matched[i]
                while state and pattern[state] != byte:
                    state = table[state - 1]
                if pattern[state] == byte:
                    state += 1
                if state == len(pattern):
                    start = self._length - len(pattern)
                    if hit is None or start < hit.start:
                        hit = StopHit(text, start)
                    state = table[state - 1]
                self._matched[i] = state
            if hit is not None:
                return hit
        return None


def _failure_table(pattern: bytes) -> list[int]:
    """`table[i]`: length of the longest proper prefix of `pattern` that ends `pattern[: i + 1]`."""
    table = [0] * len(pattern)
    state = 0
    for i in range(1, len(pattern)):
        while state and pattern[i] != pattern[state]:
            state = table[state - 1]
        if pattern[i] == pattern[state]:
            state += 1
        table[i] = state
    return table
