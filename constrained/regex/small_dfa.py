"""Builds the byte automaton of a small pattern, within a fixed bound on the work.

outlines-core takes time exponential in n for some patterns as plain as `[1-9][0-9]{0,n}`. Here the pattern's Glushkov
automaton (one state for each character written out, no empty transitions) is made deterministic by subsets, and given
up when it grows beyond a limit; characters beyond ASCII are then spelled in bytes. Other patterns are left to
outlines-core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.char_classes import Ranges
from plait.constrained.regex.glushkov import Fragment, GlushkovBuilder
from plait.constrained.regex.python_syntax import ParseItem, parse_regex
from plait.constrained.regex.utf8_rows import split_classes, utf8_rows
from plait.constrained.tokens.byte_trie import Int32Array

MAX_POSITIONS = 512
MAX_WORK = 20_000  # pairs of a state and one of its positions or of eight bytes, rows of bytes; about 1 us each
RANGE_WORK = 3  # for each range of characters beyond ASCII, once for each set of classes
_START = -1


def build_small_dfa(plain: str, max_work: int = MAX_WORK) -> tuple[Int32Array, int, NDArray[np.bool_]]:
    """Returns the byte automaton of a plain pattern: next states [S, 256] (-1: none), start, accepting [S].

    Raises DfaTooLarge for a pattern that exceeds the bound.

    >>> states, start, accepting = build_small_dfa("ab|a")
    >>> bool(accepting[states[start, ord("a")]])
    True
    """
    builder = _Builder()
    try:
        whole = builder.sequence(parse_regex(plain))
    except RecursionError:
        raise DfaTooLarge from None
    return _Determinizer(builder, whole, max_work).build()


def reached_pairs(rows: Int32Array, others: Int32Array, max_pairs: int) -> Iterator[tuple[int, int]]:
    """Yields the states, other than both starts, that one text reaches in two automata, given by their next states.

    Raises DfaTooLarge once there are more than `max_pairs`.

    >>> states, _, _ = build_small_dfa("ab")
    >>> list(reached_pairs(states, states, 9))
    [(1, 1), (2, 2)]
    """
    seen, todo = set[tuple[int, int]](), [(0, 0)]
    while todo:
        at, other = todo.pop()
        row, other_row = rows[at], others[other]
        both = (row >= 0) & (other_row >= 0)
        new = set(zip(row[both].tolist(), other_row[both].tolist(), strict=True)) - seen
        seen |= new
        if len(seen) > max_pairs:
            raise DfaTooLarge
        todo += new
        yield from new


class _Builder(GlushkovBuilder):
    """`accepts` and `accepts_beyond`: the ASCII characters and the ranges beyond them that each position accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts: list[frozenset[int]] = []
        self.accepts_beyond: list[Ranges] = []

    def character(self, op: str, value: Any, flags: int) -> Fragment[int]:
        if op not in ("LITERAL", "IN") or len(self.accepts) >= MAX_POSITIONS:
            raise DfaTooLarge
        accepted = [(value, value)] if op == "LITERAL" else _members(value)
        self.accepts.append(frozenset(char for low, high in accepted for char in range(low, min(high + 1, 0x80))))
        self.accepts_beyond.append(tuple((max(low, 0x80), high) for low, high in accepted if high >= 0x80))
        return self.new_position()


def _members(members: list[ParseItem]) -> list[tuple[int, int]]:
    """Returns the ranges of a class; that of no character is written as the complement of all characters."""
    if str(members[0][0]) == "NEGATE":
        if [content for _, content in members[1:]] != [(0, 0x10FFFF)]:
            raise DfaTooLarge  # not a plain pattern
        return []
    return [(content, content) if str(kind) == "LITERAL" else content for kind, content in members]


class _EncodedClasses(NamedTuple):
    """Disjoint classes beyond ASCII spelled in bytes (see utf8_rows), and the given classes that each belongs to."""

    rows: Int32Array
    members: list[tuple[int, ...]]


class _Determinizer:
    """Makes the states of one pattern: sets of positions, and between them the rows for the bytes of a character."""

    def __init__(self, builder: _Builder, whole: Fragment[int], max_work: int) -> None:
        self._builder, self._whole = builder, whole
        self._work_left = max_work
        self._todo = [frozenset((_START,))]
        self._number = {self._todo[0]: 0}
        self._encodings: dict[tuple[Ranges, ...], _EncodedClasses] = {}

    def build(self) -> tuple[Int32Array, int, NDArray[np.bool_]]:
        ascii_rows: list[dict[int, int]] = []
        beyond: list[tuple[int, _EncodedClasses, tuple[int, ...]]] = []  # a state, and the ones its classes lead to
        for index, subset in enumerate(self._todo):  # grows
            following = self._following(subset)
            ascii_rows.append(self._ascii_row(following))
            encoding, targets = self._beyond(following)
            if encoding is not None:
                beyond.append((index, encoding, targets))
        parts = [np.full((len(ascii_rows), 256), -1, np.int32)]
        for index, row in enumerate(ascii_rows):
            if row:
                parts[0][index, list(row)] = list(row.values())
        self._add_rows(parts, beyond)
        states = np.concatenate(parts)
        accepting = np.zeros(len(states), np.bool_)
        accepting[: len(self._todo)] = [
            self._whole.is_optional,
            *(not self._whole.last.isdisjoint(subset) for subset in self._todo[1:]),
        ]
        return states, 0, accepting

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise DfaTooLarge

    def _following(self, subset: frozenset[int]) -> frozenset[int]:
        follow, accepts = self._builder.follow, self._builder.accepts
        is_start = _START in subset
        following = self._whole.first if is_start else frozenset().union(*(follow[at] for at in subset))
        self._spend(1 + len(following) + sum(len(accepts[at]) for at in following) // 8)
        return following

    def _state(self, positions: Iterable[int]) -> int:
        target = frozenset(positions)
        if target not in self._number:
            self._number[target] = len(self._number)
            self._todo.append(target)
        return self._number[target]

    def _ascii_row(self, following: frozenset[int]) -> dict[int, int]:
        reached: dict[int, set[int]] = {}
        for position in following:
            for byte in self._builder.accepts[position]:
                reached.setdefault(byte, set()).add(position)
        return {byte: self._state(positions) for byte, positions in reached.items()}

    def _beyond(self, following: frozenset[int]) -> tuple[_EncodedClasses | None, tuple[int, ...]]:
        """Returns how the characters beyond ASCII are spelled that may follow, and the states after them."""
        positions: dict[Ranges, list[int]] = {}
        for position in sorted(following):
            if self._builder.accepts_beyond[position]:
                positions.setdefault(self._builder.accepts_beyond[position], []).append(position)
        if not positions:
            return None, ()
        classes = tuple(sorted(positions))
        encoding = self._encodings.get(classes)
        if encoding is None:
            self._spend(RANGE_WORK * sum(map(len, classes)))
            pieces = split_classes(classes)
            encoding = _EncodedClasses(utf8_rows([ranges for ranges, _ in pieces]), [members for _, members in pieces])
            self._encodings[classes] = encoding
        reached = [
            self._state(position for member in members for position in positions[classes[member]])
            for members in encoding.members
        ]
        return encoding, tuple(reached)

    def _add_rows(self, parts: list[Int32Array], beyond: list[tuple[int, _EncodedClasses, tuple[int, ...]]]) -> None:
        """Appends the rows for the later bytes of characters to `parts`, and fills in those for the first bytes."""
        first: dict[tuple[int, tuple[int, ...]], Int32Array] = {}
        count = len(parts[0])
        for state, encoding, targets in beyond:
            key = id(encoding), targets
            if key not in first:
                self._spend(len(encoding.rows))
                later = np.arange(count, count + len(encoding.rows) - 1)
                where_to = np.array([*reversed(targets), -1, -1, *later], np.int32)  # of the entries -2 - k .. R - 1
                rows = where_to[encoding.rows + len(targets) + 1]
                first[key] = rows[0]
                parts.append(rows[1:])
                count += len(rows) - 1
            parts[0][state, 0x80:] = first[key][0x80:]
