"""Finds stop strings and stop patterns in a stream of bytes, across token borders.

Each stop string has a Knuth-Morris-Pratt automaton and each pattern its own automaton, which bounds the cost per
byte.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from plait.constrained.regex.incremental_search import IncrementalSearch, search_automaton


class StopHit(NamedTuple):
    """A match: the stop string or pattern, and the byte offset at which the match begins."""

    text: str
    start: int


class StopScanner:
    """Scans the bytes of one output. The first `num_safe` bytes can no longer be part of a match.

    Patterns have the syntax of `search_automaton` and match characters; invalid UTF-8 is U+FFFD.

    >>> scanner = StopScanner(("END",), (r"[0-9]+;",))
    >>> scanner.push(b"the E"), scanner.num_safe
    (None, 4)
    >>> scanner.push(b"ight 12"), scanner.num_safe
    (None, 10)
    >>> scanner.push(b"3; ...")
    StopHit(text='[0-9]+;', start=10)
    """

    def __init__(self, stops: tuple[str, ...], patterns: tuple[str, ...] = ()) -> None:
        self._strings = _StopStrings(stops)
        self._patterns = _StopPatterns(patterns) if patterns else None

    @property
    def num_safe(self) -> int:
        safe = self._strings.num_safe
        return safe if self._patterns is None else min(safe, self._patterns.num_safe)

    def skip(self, num_bytes: int) -> None:
        """Counts bytes in which nothing is searched, and before any that are: the reasoning before a value."""
        self._strings.length += num_bytes
        if self._patterns is not None:
            self._patterns.skip(num_bytes)

    def push(self, data: bytes) -> StopHit | None:
        """Returns the first match that `data` completes; of several that end together, the one that begins first."""
        hit = self._strings.push(data)
        if self._patterns is None:
            return hit
        pattern_hit = self._patterns.push(data)
        if hit is None or pattern_hit is None:
            return hit or pattern_hit
        return min((self._strings.length, hit.start, hit), (self._patterns.length, pattern_hit.start, pattern_hit))[-1]


class _StopStrings:
    """Matches the stop strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [(text, text.encode(), _failure_table(text.encode())) for text in stops]
        self._matched = [0] * len(stops)  # per string: length of its longest prefix that the stream ends with
        self.length = 0  # bytes scanned so far

    @property
    def num_safe(self) -> int:
        return self.length - max(self._matched) if self._matched else self.length

    def push(self, data: bytes) -> StopHit | None:
        """Returns the first stop string that `data` completes, the longest one of several that end together."""
        if not self._stops:
            self.length += len(data)
            return None
        for byte in data:
            self.length += 1
            hit: StopHit | None = None
            for i, (text, pattern, table) in enumerate(self._stops):
                state = self._matched[i]
                while state and pattern[state] != byte:
                    state = table[state - 1]
                if pattern[state] == byte:
                    state += 1
                if state == len(pattern):
                    start = self.length - len(pattern)
                    if hit is None or start < hit.start:
                        hit = StopHit(text, start)
                    state = table[state - 1]
                self._matched[i] = state
            if hit is not None:
                return hit
        return None


class _StopPatterns:
    """Matches the stop patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._searches = [(pattern, IncrementalSearch(search_automaton(pattern))) for pattern in patterns]
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.length = 0
        self._char_start = 0  # where the incomplete last character begins

    def skip(self, num_bytes: int) -> None:
        self.length += num_bytes
        self._char_start = self.length

    @property
    def num_safe(self) -> int:
        return min(
            self._char_start,
            *(
                search.earliest_start if search.earliest_start is not None else self._char_start
                for _, search in self._searches
            ),
        )

    def push(self, data: bytes) -> StopHit | None:
        for byte in data:
            self.length += 1
            characters = self._decode(bytes((byte,)))
            for index, char in enumerate(characters):
                is_last = index == len(characters) - 1
                if index and is_last:
                    self._char_start = self.length - 1  # this byte proved the bytes before it invalid
                hit = self._step_patterns(char)
                if hit is not None:
                    return hit
            if characters:
                self._char_start = self.length
        return None

    def _step_patterns(self, char: str) -> StopHit | None:
        matches = [
            (start, pattern)
            for pattern, search in self._searches
            if (start := search.step(char, self._char_start)) is not None
        ]
        return StopHit(min(matches)[1], min(matches)[0]) if matches else None


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
