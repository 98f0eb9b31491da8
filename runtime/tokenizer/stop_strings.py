"""Finds stop strings and stop patterns in a growing byte stream, across token borders.

One Knuth-Morris-Pratt automaton per stop string and one automaton per pattern, so that the cost of a byte is bounded
whatever the strings and patterns are. Knows: bytes. Must not know: tokens or sessions.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from plait.constrained.regex.incremental_search import IncrementalSearch, search_automaton


class StopHit(NamedTuple):
    """The stop string, or the pattern, that was completed first, and the byte offset at which its match begins."""

    text: str
    start: int


class StopScanner:
    """Feed it the output's bytes; `num_safe` bytes can no longer be cut off by a stop string or pattern.

    Patterns are matched against characters; a byte that is of none is U+FFFD. They are `search_automaton`'s.

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

    def push(self, data: bytes) -> StopHit | None:
        """The first one completed by `data`, the one that begins first where several end together; else None."""
        hit = self._strings.push(data)
        if self._patterns is None:
            return hit
        found = self._patterns.push(data)
        if hit is None or found is None:
            return hit or found
        return min((self._strings.length, hit.start, hit), (self._patterns.length, found.start, found))[-1]


class _StopStrings:
    """The stop strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [(text, text.encode(), _failure_table(text.encode())) for text in stops]
        self._matched = [0] * len(stops)  # length of the longest prefix of each that ends the stream
        self.length = 0  # bytes up to here were looked at

    @property
    def num_safe(self) -> int:
        return self.length - max(self._matched) if self._matched else self.length

    def push(self, data: bytes) -> StopHit | None:
        """The first stop string completed by `data`, the longest where several end together; else None."""
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
    """The stop patterns, which see characters."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._searches = [(pattern, IncrementalSearch(search_automaton(pattern))) for pattern in patterns]
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.length = 0
        self._char_start = 0  # where the character begins whose bytes are not all there

    @property
    def num_safe(self) -> int:
        return min(
            self._char_start,
            *(
                each.earliest_start if each.earliest_start is not None else self._char_start
                for _, each in self._searches
            ),
        )

    def push(self, data: bytes) -> StopHit | None:
        for byte in data:
            self.length += 1
            characters = self._decode(bytes((byte,)))
            for index, char in enumerate(characters):
                is_last = index == len(characters) - 1
                if index and is_last:
                    self._char_start = self.length - 1  # the byte that showed the ones before it to be no character
                hit = self._step_patterns(char)
                if hit is not None:
                    return hit
            if characters:
                self._char_start = self.length
        return None

    def _step_patterns(self, char: str) -> StopHit | None:
        found = [
            (start, text) for text, each in self._searches if (start := each.step(char, self._char_start)) is not None
        ]
        return StopHit(min(found)[1], min(found)[0]) if found else None


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
