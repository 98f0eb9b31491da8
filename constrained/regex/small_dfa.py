"""Builds the byte automaton of a small pattern of ASCII classes, within a fixed bound on the work.

outlines-core takes time exponential in n for some patterns as plain as `[1-9][0-9]{0,n}`. Here the pattern's Glushkov
automaton (one state for each character written out, no empty transitions) is made deterministic by subsets, and given
up when it grows beyond a limit. Other patterns are left to outlines-core.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.constrained.byte_trie import Int32Array
from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.python_syntax import MAXREPEAT, ParseItem, parse_regex

MAX_POSITIONS = 512
MAX_WORK = 20_000  # pairs of a state and one of its positions or of eight bytes; about 1 us each
_START = -1


class _Fragment(NamedTuple):
    """A part of the pattern: the positions with which it can begin and end, and whether it matches the empty text."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    is_optional: bool = True


def build_small_dfa(plain: str, max_work: int = MAX_WORK) -> tuple[Int32Array, int, NDArray[np.bool_]]:
    """Returns the byte automaton of a plain pattern: next states [S, 256] (-1: none), start, accepting [S].

    Raises DfaTooLarge for a pattern with a class beyond ASCII, or one that exceeds the bound.

    >>> states, start, accepting = build_small_dfa("ab|a")
    >>> bool(accepting[states[start, ord("a")]])
    True
    """
    builder = _Builder()
    try:
        whole = builder.sequence(parse_regex(plain))
    except RecursionError:
        raise DfaTooLarge from None
    return _determinize(builder, whole, max_work)


class _Builder:
    """The positions so far: the bytes that each one accepts, and the positions that may follow it."""

    def __init__(self) -> None:
        self.accepts: list[frozenset[int]] = []
        self.follow: list[set[int]] = []

    def sequence(self, items: Iterable[ParseItem]) -> _Fragment:
        fragment = _Fragment()
        for op, value in items:
            fragment = self._concat(fragment, self._item(str(op), value))
        return fragment

    def _item(self, op: str, value: Any) -> _Fragment:
        match op:
            case "LITERAL":
                fragment = _Fragment()
                for byte in chr(value).encode():
                    fragment = self._concat(fragment, self._position(frozenset((byte,))))
                return fragment
            case "IN":
                return self._position(_ascii_members(value))
            case "SUBPATTERN":
                return self.sequence(value[3])
            case "BRANCH":
                arms = [self.sequence(arm) for arm in value[1]]
                return _Fragment(
                    frozenset().union(*(arm.first for arm in arms)),
                    frozenset().union(*(arm.last for arm in arms)),
                    any(arm.is_optional for arm in arms),
                )
            case "MAX_REPEAT":
                return self._repeat(*value)
        raise DfaTooLarge

    def _position(self, accepted: frozenset[int]) -> _Fragment:
        if len(self.accepts) >= MAX_POSITIONS:
            raise DfaTooLarge
        self.accepts.append(accepted)
        self.follow.append(set())
        here = frozenset((len(self.accepts) - 1,))
        return _Fragment(here, here, False)

    def _concat(self, one: _Fragment, other: _Fragment) -> _Fragment:
        for position in one.last:
            self.follow[position] |= other.first
        return _Fragment(
            one.first | other.first if one.is_optional else one.first,
            one.last | other.last if other.is_optional else other.last,
            one.is_optional and other.is_optional,
        )

    def _repeat(self, low: int, high: Any, items: list[ParseItem]) -> _Fragment:
        if high is MAXREPEAT:
            tail = self.sequence(items)
            for position in tail.last:
                self.follow[position] |= tail.first
            tail = tail._replace(is_optional=tail.is_optional or low == 0)
            num_before = max(0, low - 1)
        else:  # x{0,3} is (x(x(x)?)?)?, whose positions have few successors
            tail = _Fragment()
            if high - low > MAX_POSITIONS:
                raise DfaTooLarge
            for _ in range(high - low):
                tail = self._concat(self.sequence(items), tail)._replace(is_optional=True)
            num_before = low
        if num_before > MAX_POSITIONS:
            raise DfaTooLarge
        before = _Fragment()
        for _ in range(num_before):
            before = self._concat(before, self.sequence(items))
        return self._concat(before, tail)


def _ascii_members(members: list[ParseItem]) -> frozenset[int]:
    accepted = set[int]()
    for kind, content in members:
        if str(kind) not in ("LITERAL", "RANGE"):
            raise DfaTooLarge
        low, high = (content, content) if str(kind) == "LITERAL" else content
        if high >= 0x80:
            raise DfaTooLarge
        accepted |= set(range(low, high + 1))
    return frozenset(accepted)


def _determinize(builder: _Builder, whole: _Fragment, max_work: int) -> tuple[Int32Array, int, NDArray[np.bool_]]:
    start = frozenset((_START,))
    number = {start: 0}
    rows: list[dict[int, int]] = []
    todo, work = [start], 0
    for subset in todo:  # grows
        following = whole.first if subset is start else frozenset().union(*(builder.follow[at] for at in subset))
        work += 1 + len(following) + sum(len(builder.accepts[at]) for at in following) // 8
        if work > max_work:
            raise DfaTooLarge
        reached: dict[int, set[int]] = {}
        for position in following:
            for byte in builder.accepts[position]:
                reached.setdefault(byte, set()).add(position)
        row: dict[int, int] = {}
        for byte, positions in reached.items():
            target = frozenset(positions)
            if target not in number:
                number[target] = len(number)
                todo.append(target)
            row[byte] = number[target]
        rows.append(row)
    states = np.full((len(rows), 256), -1, np.int32)
    for index, row in enumerate(rows):
        if row:
            states[index, list(row)] = list(row.values())
    accepting = [whole.is_optional, *(not whole.last.isdisjoint(subset) for subset in todo[1:])]
    return states, 0, np.array(accepting, np.bool_)
