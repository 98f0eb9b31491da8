"""Finds the first match of a pattern in a text that grows one character at a time (for stop_regex).

The automaton is Glushkov's (one state for each character class of the pattern, no empty transitions), run as a set of
states, each with the earliest position at which its match began (Thompson 1968; Pike's virtual machine). A character
costs at most one look at each edge, whatever the pattern; there is no backtracking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from plait.constrained.regex.char_classes import escape_code_point
from plait.constrained.regex.python_syntax import CATEGORIES, CLASS_FLAGS, MAXREPEAT, ParseItem, parse_regex
from plait.constrained.specs import GrammarError

MAX_SEARCH_BYTES = 1024
MAX_STATES = 256
MAX_EDGES = 2048
CharPredicate: TypeAlias = Callable[[str], object]

_REFUSED = {
    "AT": "an anchor or a word boundary is not supported: the pattern is searched anywhere in a growing text",
    "ASSERT": "lookaround is not supported",
    "ASSERT_NOT": "lookaround is not supported",
    "FAILURE": "lookaround is not supported",
    "GROUPREF": "a backreference is not supported",
    "GROUPREF_EXISTS": "a conditional group is not supported",
    "ATOMIC_GROUP": "an atomic group is not supported",
    "POSSESSIVE_REPEAT": "a possessive quantifier is not supported",
}


class GlushkovAutomaton(NamedTuple):
    """States are numbered; state i accepts the characters for which `accepts[i]` is true, and `follow[i]` come next."""

    accepts: Sequence[CharPredicate]
    first: tuple[int, ...]
    follow: Sequence[tuple[int, ...]]
    last: frozenset[int]

    @property
    def num_edges(self) -> int:
        return len(self.first) + sum(map(len, self.follow))


@lru_cache(maxsize=256)
def search_automaton(pattern: str) -> GlushkovAutomaton:
    """Returns the automaton of a pattern in Python's syntax: at most 1,024 bytes, 256 states and 2,048 edges.

    Raises GrammarError for what `re` refuses, anchors, lookaround, backreferences, and patterns that match the empty
    text.

    >>> search_automaton("ab|a").last
    frozenset({0, 1})
    """
    if len(pattern.encode(errors="replace")) > MAX_SEARCH_BYTES:
        raise GrammarError(f"the pattern is longer than {MAX_SEARCH_BYTES} bytes")
    builder = _Builder()
    try:
        tree = parse_regex(pattern)
        fragment = builder.sequence(list(tree), tree.state.flags)
    except re.error as error:
        raise GrammarError(error.msg, error.pos) from None
    except OverflowError:
        raise GrammarError("a repeat count is too large") from None
    except RecursionError:
        raise GrammarError("the pattern is nested too deeply") from None
    if fragment.is_optional:
        raise GrammarError("the pattern matches the empty text")
    return GlushkovAutomaton(
        tuple(builder.accepts), fragment.first, tuple(tuple(sorted(states)) for states in builder.follow), fragment.last
    )


class IncrementalSearch:
    """The state of a search; `step` takes the characters of the text in order.

    >>> search = IncrementalSearch(search_automaton("[0-9]+x"))
    >>> [search.step(char, at) for at, char in enumerate("a12x")], search.earliest_start
    ([None, None, None, 1], 1)
    """

    def __init__(self, automaton: GlushkovAutomaton) -> None:
        self._automaton = automaton
        self._active: dict[int, int] = {}  # state -> the earliest start of a match that is in this state

    @property
    def earliest_start(self) -> int | None:
        """The start of the earliest match that may still continue; None if there is none."""
        return min(self._active.values(), default=None)

    def step(self, char: str, at: int) -> int | None:
        """Takes the character at position `at`. Returns the start of the earliest match that ends with it, or None."""
        accepts, first, follow, last = self._automaton
        active: dict[int, int] = {}
        for state, start in sorted(self._active.items(), key=_start_of):
            for next_state in follow[state]:
                if next_state not in active and accepts[next_state](char):
                    active[next_state] = start
        for state in first:
            if state not in active and accepts[state](char):
                active[state] = at
        self._active = active
        return min((start for state, start in active.items() if state in last), default=None)


def _start_of(entry: tuple[int, int]) -> int:
    return entry[1]


class _Fragment(NamedTuple):
    """A part of a pattern: the states it may begin and end with, and whether it may be empty."""

    first: tuple[int, ...] = ()
    last: frozenset[int] = frozenset()
    is_optional: bool = True


class _Builder:
    """Builds states and edges from the items of a parse tree."""

    def __init__(self) -> None:
        self.accepts: list[CharPredicate] = []
        self.follow: list[set[int]] = []
        self._num_edges = 0

    def sequence(self, items: Sequence[ParseItem], flags: int) -> _Fragment:
        joined = _Fragment()
        for op, value in items:
            joined = self._joined(joined, self._fragment(str(op), value, flags))
        return joined

    def _fragment(self, op: str, value: Any, flags: int) -> _Fragment:
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._state(_class(op, value, flags))
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, items = value
                return self._repeat(low, high, list(items), flags)
            case "SUBPATTERN":
                _, added, removed, items = value
                return self.sequence(list(items), (flags | added) & ~removed)
            case "BRANCH":
                arms = [self.sequence(list(arm), flags) for arm in value[1]]
                first = tuple(state for arm in arms for state in arm.first)
                last = frozenset().union(*(arm.last for arm in arms))
                return _Fragment(first, last, any(arm.is_optional for arm in arms))
        raise GrammarError(_REFUSED.get(op, f"{op.lower()} is not supported"))

    def _state(self, accepts: CharPredicate) -> _Fragment:
        if len(self.accepts) == MAX_STATES:
            raise GrammarError(f"the pattern has more than {MAX_STATES} characters once its repeats are written out")
        self.accepts.append(accepts)
        self.follow.append(set())
        state = len(self.accepts) - 1
        return _Fragment((state,), frozenset([state]), False)

    def _repeat(self, low: int, high: int, items: Sequence[ParseItem], flags: int) -> _Fragment:
        joined = _Fragment()
        copies = low if high is MAXREPEAT else high
        for index in range(max(copies, 1) if high is MAXREPEAT else copies):
            copy = self.sequence(items, flags)
            if not copy.first:
                return copy  # nothing but empty text, however often
            if high is MAXREPEAT and index >= copies - 1:
                self._connect(copy.last, copy.first)
            joined = self._joined(joined, copy._replace(is_optional=copy.is_optional or index >= low))
        return joined

    def _joined(self, before: _Fragment, after: _Fragment) -> _Fragment:
        self._connect(before.last, after.first)
        first = before.first + after.first if before.is_optional else before.first
        last = before.last | after.last if after.is_optional else after.last
        return _Fragment(first, last, before.is_optional and after.is_optional)

    def _connect(self, last: frozenset[int], first: tuple[int, ...]) -> None:
        for state in last:
            known = len(self.follow[state])
            self.follow[state].update(first)
            self._num_edges += len(self.follow[state]) - known
        if self._num_edges > MAX_EDGES:
            raise GrammarError(f"the automaton of the pattern has more than {MAX_EDGES} edges")


def _class(op: str, value: Any, flags: int) -> CharPredicate:
    """Returns a predicate that is true for the characters of a class, as `re` defines it."""
    if op == "ANY":
        return re.compile(".", flags & re.DOTALL).match
    members: Sequence[ParseItem] = value if op == "IN" else [("LITERAL", value)]
    if op == "LITERAL" and not flags & re.IGNORECASE:
        return chr(value).__eq__
    text = "^" if op == "NOT_LITERAL" else ""
    for kind, content in members:
        match str(kind):
            case "NEGATE":
                text += "^"
            case "CATEGORY":
                text += CATEGORIES[str(content)]
            case "LITERAL":
                text += escape_code_point(content)
            case _:
                text += "-".join(map(escape_code_point, content))
    return re.compile(f"[{text}]", flags & CLASS_FLAGS).match
