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
from plait.constrained.regex.glushkov import Fragment, GlushkovBuilder
from plait.constrained.regex.python_syntax import (
    CATEGORIES,
    CLASS_FLAGS,
    REASONS,
    ParseItem,
    parse_regex,
    syntax_errors,
)
from plait.constrained.specs import GrammarError

MAX_SEARCH_BYTES = 1024
MAX_STATES = 256
MAX_EDGES = 2048
CharPredicate: TypeAlias = Callable[[str], object]

_ANCHOR = "an anchor or a word boundary is not supported: the pattern is searched anywhere in a growing text"


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
    with syntax_errors():
        tree = parse_regex(pattern)
        fragment = builder.sequence(tree, tree.state.flags)
    if fragment.is_optional:
        raise GrammarError("the pattern matches the empty text")
    return GlushkovAutomaton(
        tuple(builder.accepts),
        tuple(sorted(fragment.first)),
        tuple(tuple(sorted(states)) for states in builder.follow),
        fragment.last,
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


class _Builder(GlushkovBuilder):
    """Builds states and edges from the items of a parse tree."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts: list[CharPredicate] = []
        self._num_edges = 0

    def character(self, op: str, value: Any, flags: int) -> Fragment[int]:
        if op not in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            reason = _ANCHOR if op == "AT" else REASONS.get(op, f"{op.lower()} is not supported")
            raise GrammarError(reason)
        if len(self.accepts) == MAX_STATES:
            raise GrammarError(f"the pattern has more than {MAX_STATES} characters once its repeats are written out")
        self.accepts.append(_class(op, value, flags))
        return self.new_position()

    def connect(self, last: frozenset[int], first: frozenset[int]) -> None:
        known = sum(len(self.follow[state]) for state in last)
        super().connect(last, first)
        self._num_edges += sum(len(self.follow[state]) for state in last) - known
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
