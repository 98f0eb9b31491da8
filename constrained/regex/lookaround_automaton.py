"""Patterns with lookaround, anchors and word boundaries anywhere, written as plain patterns: by one automaton.

The automaton is alternating. A state holds several possibilities, of which one must succeed; a possibility is a set of
continuations, all of which must match the rest of the text. Lookahead adds a continuation to its possibility. Negative
lookahead adds a state of its own, which must fail. Lookbehind is decided by automata that run from the text's start.

    ^(?!b)[ab]+$     {{not b.*, [ab]+}}  after "a":  {{[ab]*}}      after "b": nothing succeeds
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from plait.constrained.regex.char_classes import MAX_CHARACTER, Ranges, merge_ranges, named_ranges
from plait.constrained.regex.pattern_algebra import write_automaton
from plait.constrained.regex.python_syntax import MAXREPEAT, ParseItem, PlainPattern, PlainPatternWriter
from plait.constrained.specs import GrammarError

MAX_STATES = 1_000
MAX_STEPS = 8_000  # from a state by a class of characters
MAX_WORK = 60_000
TOO_MANY_STATES = "the automaton of its pattern has too many states"
MAX_ASCII = 127
MAX_ALTERNATIVES = 200  # possibilities in one state


class Node(NamedTuple):
    """A part of a pattern. `kind`: chars, or, repeat, start, end, boundary, ahead, behind."""

    kind: str
    inner: tuple[Any, ...] = ()  # the alternatives, each a sequence of nodes
    chars: frozenset[int] = frozenset()
    low: int = 0
    high: int = -1  # -1: without a bound
    negated: bool = False
    number: int = 0


Sequence: TypeAlias = tuple[Node, ...]
Must: TypeAlias = frozenset[Any]
"""Continuations that must all match the rest; one that is ("not", state) must not match it."""
State: TypeAlias = frozenset[Must]


class Place(NamedTuple):
    """What precedes a place in a text.

    Whether a character beyond ASCII belongs to a word differs between dialects, so beside one neither `\\b` nor `\\B`
    matches.
    """

    is_start: bool
    before: str  # the kind of the character: "word", "other" (also at the start), or "unknown"
    behind: tuple[bool, ...]  # for each lookbehind, whether a text before the place matches it


def with_lookaround(items: list[ParseItem], spelled: str) -> PlainPattern:
    """Returns a plain pattern of the texts in which a parsed pattern is found. Raises GrammarError if it is too large.

    >>> import re._parser as parser
    >>> with_lookaround(list(parser.parse(r"^(?!b)[ab]\\Z")), "").pattern
    '[\\\\U00000061]'
    """
    builder = _Builder(items, spelled)
    written = builder.automaton().write()
    return PlainPattern(written, len(written), float(written.count("\\U")))


class _Builder:
    """Translates the parse tree to nodes over classes of characters that the pattern does not tell apart."""

    def __init__(self, items: list[ParseItem], spelled: str) -> None:
        self._writer = PlainPatternWriter(spelled)
        self._sets: dict[Ranges, None] = {}
        self._word = merge_ranges(list(named_ranges(r"\w", int(re.ASCII))), negated=False)
        self._collect(items)
        self._classes = _partition([*self._sets, self._word, ((0, MAX_ASCII),)])
        self._every = frozenset(range(len(self._classes)))
        self._behind: list[Sequence] = []
        self._in_negative, self._has_boundary = 0, False
        self.any_text = Node("repeat", ((Node("chars", chars=self._every),),))
        self._root = (self.any_text, *self._sequence(items), self.any_text)

    def automaton(self) -> _Automaton:
        behind = [(self.any_text, *sequence) for sequence in self._behind]
        words = self._members(self._word)
        kinds = ["word" if at in words else self._kind(at) for at in range(len(self._classes))]
        kinds = kinds if self._has_boundary else ["other"] * len(kinds)
        return _Automaton(self._root, behind, self._classes, kinds, self.any_text)

    def _kind(self, at: int) -> str:
        return "unknown" if self._classes[at][0][0] > MAX_ASCII else "other"

    def _collect(self, items: list[ParseItem]) -> None:
        for op, value in items:
            match str(op):
                case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                    self._sets[self._ranges(str(op), value)] = None
                case "MAX_REPEAT" | "MIN_REPEAT":
                    self._collect(list(value[2]))
                case "SUBPATTERN":
                    self._collect(list(value[3]))
                case "BRANCH":
                    for arm in value[1]:
                        self._collect(list(arm))
                case "ASSERT" | "ASSERT_NOT":
                    self._collect(list(value[1]))

    def _ranges(self, op: str, value: Any) -> Ranges:
        return self._writer.character_ranges(op, value, re.ASCII)

    def _members(self, ranges: Ranges) -> frozenset[int]:
        return frozenset(at for at, found in enumerate(self._classes) if _contains(ranges, found[0][0]))

    def _sequence(self, items: list[ParseItem]) -> Sequence:
        return tuple(node for op, value in items for node in self._nodes(str(op), value))

    def _nodes(self, op: str, value: Any) -> Sequence:
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return (Node("chars", chars=self._members(self._ranges(op, value))),)
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, items = value
                return (
                    Node("repeat", (self._sequence(list(items)),), low=low, high=-1 if high is MAXREPEAT else high),
                )
            case "SUBPATTERN" if not value[1] and not value[2]:
                return self._sequence(list(value[3]))
            case "BRANCH":
                return (Node("or", tuple(self._sequence(list(arm)) for arm in value[1])),)
            case "FAILURE":
                return (Node("or"),)
            case "ASSERT" | "ASSERT_NOT":
                self._in_negative += op == "ASSERT_NOT"
                inner = self._sequence(list(value[1]))
                self._in_negative -= op == "ASSERT_NOT"
                if value[0] > 0:
                    return (Node("ahead", ((*inner, self.any_text),), negated=op == "ASSERT_NOT"),)
                if any(node.kind in ("ahead", "behind") for node in inner):
                    raise GrammarError("lookaround within lookbehind is not supported")
                self._behind.append(inner)
                return (Node("behind", negated=op == "ASSERT_NOT", number=len(self._behind) - 1),)
            case "AT":
                if self._in_negative and "BOUNDARY" in str(value):
                    raise GrammarError("a word boundary within negative lookaround is not supported")
                self._has_boundary |= "BOUNDARY" in str(value)
                kinds = {"AT_BEGINNING": "start", "AT_BEGINNING_STRING": "start", "AT_END_STRING": "end"}
                kinds |= {"AT_BOUNDARY": "boundary", "AT_NON_BOUNDARY": "boundary"}
                if str(value) in kinds:
                    return (Node(kinds[str(value)], negated=str(value) == "AT_NON_BOUNDARY"),)
        raise self._writer.refusal(op)


class _Automaton:
    def __init__(
        self, root: Sequence, behind: list[Sequence], classes: list[Ranges], kinds: list[str], any_text: Node
    ) -> None:
        self._classes, self._kinds, self._any_text, self._work = classes, kinds, any_text, 0
        self._root: State = frozenset((frozenset((root,)),))
        self._behind: tuple[State, ...] = tuple(frozenset((frozenset((one,)),)) for one in behind)

    def write(self) -> str:
        """Returns the automaton as a plain pattern."""
        initial = (self._root, self._behind, True, "other")
        numbers: dict[Any, int] = {initial: 0}
        todo, table, finals = [initial], list[list[int]](), set[int]()
        while todo:
            rows = []
            for state, behind, is_start, before in todo:
                place = self._place(behind, is_start, before)
                if self._matches_end(state, place):
                    finals.add(len(table))
                row = []
                for char in range(len(self._classes)):
                    after = (
                        self._after(state, place, char),
                        tuple(self._after(one, place, char) for one in behind),
                        False,
                        self._kinds[char],
                    )
                    if after not in numbers:
                        numbers[after] = len(numbers)
                        rows.append(after)
                    row.append(numbers[after])
                table.append(row)
                if len(numbers) > MAX_STATES or len(table) * len(self._classes) > MAX_STEPS:
                    raise GrammarError(TOO_MANY_STATES)
            todo = rows
        return _written(table, finals, self._classes)

    def _place(self, behind: tuple[State, ...], is_start: bool, before: str) -> Place:
        bare = Place(is_start, before, ())
        return Place(is_start, before, tuple(self._matches_end(one, bare, at_end=False) for one in behind))

    def _after(self, state: State, place: Place, char: int) -> State:
        """Returns the state behind one more character."""
        found: set[Must] = set()
        for must in state:
            cases: set[Must] = {frozenset()}
            for one in must:
                cases = _both(cases, self._step(one, place, char))
                if not cases:
                    break
            found |= cases
            if len(found) > MAX_ALTERNATIVES:
                raise GrammarError(TOO_MANY_STATES)
        return _smallest(found)

    def _step(self, one: Any, place: Place, char: int) -> set[Must]:
        if one[:1] == ("not",):
            rest = self._after(one[1], place, char)
            return {frozenset()} if not rest else set() if frozenset() in rest else {frozenset((("not", rest),))}
        return self._derive(one, place, char, frozenset())

    def _derive(self, one: Sequence, place: Place, char: int, seen: frozenset[Sequence]) -> set[Must]:
        """Returns what must match behind a character, so that `one` matches from the place before it."""
        self._work += 1
        if self._work > MAX_WORK:
            raise GrammarError(TOO_MANY_STATES)
        if not one or one in seen:
            return set()
        if one == (self._any_text,):
            return {frozenset()}
        node, rest = one[0], one[1:]
        seen = seen | {one}
        match node.kind:
            case "chars":
                is_all = rest == (self._any_text,)
                return set() if char not in node.chars else {frozenset() if is_all else frozenset((rest,))}
            case "or":
                return {must for arm in node.inner for must in self._derive((*arm, *rest), place, char, seen)}
            case "repeat":
                found = set() if node.low else self._derive(rest, place, char, seen)
                return found | self._derive((*node.inner[0], *_once_less(node), *rest), place, char, seen)
            case "end":
                return set()
            case "ahead" if not node.negated:
                ahead = self._derive(node.inner[0], place, char, frozenset())
                return _both(ahead, self._derive(rest, place, char, seen)) if ahead else set()
            case "ahead":
                unless: State = frozenset((frozenset((node.inner[0],)),))
                return _both(self._step(("not", unless), place, char), self._derive(rest, place, char, seen))
        holds = self._holds(node, place, self._kinds[char])
        return self._derive(rest, place, char, seen) if holds else set()

    def _holds(self, node: Node, place: Place, after: str) -> bool:
        if node.kind == "start":
            return place.is_start
        if node.kind == "boundary":
            return "unknown" not in (place.before, after) and (place.before != after) != node.negated
        return place.behind[node.number] != node.negated

    def _matches_end(self, state: State, place: Place, at_end: bool = True) -> bool:
        return any(all(self._ends(one, place, at_end, frozenset()) for one in must) for must in state)

    def _ends(self, one: Any, place: Place, at_end: bool, seen: frozenset[Sequence]) -> bool:
        """Returns whether `one` matches the empty rest. Without `at_end`, what follows is not known to be the end."""
        if not one:
            return True
        if one[:1] == ("not",):
            return not self._matches_end(one[1], place, at_end)
        node, rest = one[0], one[1:]
        if one in seen or node.kind == "chars":
            return False
        seen = seen | {one}
        match node.kind:
            case "or":
                return any(self._ends((*arm, *rest), place, at_end, seen) for arm in node.inner)
            case "repeat":
                skipped = not node.low and self._ends(rest, place, at_end, seen)
                return skipped or self._ends((*node.inner[0], *_once_less(node), *rest), place, at_end, seen)
            case "ahead":
                ahead = self._ends(node.inner[0], place, at_end, frozenset())
                return ahead != node.negated and self._ends(rest, place, at_end, seen)
        if not at_end and node.kind != "start":
            raise GrammarError("an anchor at the end of lookbehind is not supported")
        return (node.kind == "end" or self._holds(node, place, "other")) and self._ends(rest, place, at_end, seen)


def _once_less(node: Node) -> Sequence:
    if node.high in (0, 1):
        return ()
    return (node._replace(low=max(0, node.low - 1), high=node.high - 1 if node.high > 0 else -1),)


def _both(one: set[Must], other: set[Must]) -> set[Must]:
    if len(one) * len(other) > MAX_ALTERNATIVES:
        raise GrammarError(TOO_MANY_STATES)
    return {a | b for a in one for b in other}


def _smallest(found: set[Must]) -> State:
    """Removes possibilities that demand more than another one."""
    kept: list[Must] = []
    for must in sorted(found, key=len):
        if not any(other <= must for other in kept):
            kept.append(must)
    return frozenset(kept)


def _partition(sets: list[Ranges]) -> list[Ranges]:
    """Returns the classes of characters that are in the same of the sets."""
    edges = sorted({0, MAX_CHARACTER + 1, *(edge for found in sets for low, high in found for edge in (low, high + 1))})
    groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, after in pairwise(edges):
        if not 0xD800 <= low <= 0xDFFF:
            groups.setdefault(tuple(_contains(found, low) for found in sets), []).append((low, after - 1))
    return [merge_ranges(spans, negated=False) for spans in groups.values()]


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _written(table: list[list[int]], finals: set[int], classes: list[Ranges]) -> str:
    """Returns the pattern of an automaton, given by its rows, after states that are alike are joined."""
    group = [int(state in finals) for state in range(len(table))]
    while True:
        keys = [(group[state], *(group[target] for target in row)) for state, row in enumerate(table)]
        numbers = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) == len(set(group)):
            break
        group = [numbers[key] for key in keys]
    edges: dict[int, dict[int, Ranges]] = {}
    for state, row in enumerate(table):
        spans: dict[int, list[tuple[int, int]]] = {}
        for char, target in enumerate(row):
            spans.setdefault(group[target], []).extend(classes[char])
        edges[group[state]] = {target: merge_ranges(found, negated=False) for target, found in spans.items()}
    return write_automaton(group[0], {group[state] for state in finals}, edges)
