"""Glushkov's automaton of a parse tree: a position for each character that is written out, no empty transitions.

What a position accepts, and how many there may be, is the builder's. Source: Glushkov 1961; Berry and Sethi 1986.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from plait.constrained.regex.python_syntax import MAXREPEAT, ParseItem

Position = TypeVar("Position", bound=Hashable)


class Fragment(NamedTuple, Generic[Position]):
    """A part of a pattern: the positions with which it can begin and end, and whether it matches the empty text."""

    first: frozenset[Position] = frozenset()
    last: frozenset[Position] = frozenset()
    is_optional: bool = True

    def then(self, other: Fragment[Position]) -> Fragment[Position]:
        """Returns this part with another one behind it.

        >>> Fragment(frozenset("a"), frozenset("a")).then(Fragment(frozenset("b"), frozenset("b"), False)).last
        frozenset({'b'})
        """
        return Fragment(
            self.first | other.first if self.is_optional else self.first,
            self.last | other.last if other.is_optional else other.last,
            self.is_optional and other.is_optional,
        )

    @staticmethod
    def either(arms: Iterable[Fragment[Position]]) -> Fragment[Position]:
        """Returns the alternatives as one part."""
        listed = list(arms)
        return Fragment(
            frozenset().union(*(arm.first for arm in listed)),
            frozenset().union(*(arm.last for arm in listed)),
            any(arm.is_optional for arm in listed),
        )


class GlushkovBuilder(ABC):
    """Numbers the positions from 0 on; `follow[i]` are those that may come behind position i."""

    def __init__(self) -> None:
        self.follow: list[set[int]] = []

    @abstractmethod
    def character(self, op: str, value: Any, flags: int) -> Fragment[int]:
        """Returns the position of a node that is no group, alternative or repeat. Raises the error for any other."""

    def new_position(self) -> Fragment[int]:
        """Adds a position."""
        self.follow.append(set())
        here = frozenset((len(self.follow) - 1,))
        return Fragment(here, here, False)

    def connect(self, last: frozenset[int], first: frozenset[int]) -> None:
        """Lets some positions follow others."""
        for position in last:
            self.follow[position] |= first

    def sequence(self, items: Iterable[ParseItem], flags: int = 0) -> Fragment[int]:
        """Adds the positions of items in sequence."""
        joined = Fragment[int]()
        for op, value in items:
            joined = self._joined(joined, self._fragment(str(op), value, flags))
        return joined

    def _fragment(self, op: str, value: Any, flags: int) -> Fragment[int]:
        match op:
            case "SUBPATTERN":
                _, added, removed, items = value
                return self.sequence(items, (flags | added) & ~removed)
            case "BRANCH":
                return Fragment.either([self.sequence(arm, flags) for arm in value[1]])
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, items = value
                return self._repeat(low, high, items, flags)
        return self.character(op, value, flags)

    def _repeat(self, low: int, high: Any, items: list[ParseItem], flags: int) -> Fragment[int]:
        if high is MAXREPEAT:
            tail = self.sequence(items, flags)
            self.connect(tail.last, tail.first)
            tail = tail._replace(is_optional=tail.is_optional or low == 0)
            num_before = max(0, low - 1)
        else:  # x{0,3} is (x(x(x)?)?)?, whose positions have few successors
            tail, num_before = Fragment[int](), low
            for _ in range(high - low):
                tail = self._joined(self.sequence(items, flags), tail)._replace(is_optional=True)
                if not tail.first:
                    break  # nothing but empty text, however often
        before = Fragment[int]()
        for _ in range(num_before):
            before = self._joined(before, self.sequence(items, flags))
            if not before.first:
                break
        return self._joined(before, tail)

    def _joined(self, before: Fragment[int], after: Fragment[int]) -> Fragment[int]:
        self.connect(before.last, after.first)
        return before.then(after)
