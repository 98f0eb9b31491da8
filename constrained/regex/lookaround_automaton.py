"""Converts patterns with lookaround, anchors and word boundaries to plain patterns, by an alternating automaton.

A state is a set of conjunctions, of which at least one must match the rest of the text. A conjunction is a set of
continuations, all of which must match it. Lookahead adds a continuation to its conjunction; negative lookahead adds a
state that must not match. Lookbehind is decided by further automata that start at the beginning of the text.

    ^(?!b)[ab]+$     {{not b.*, [ab]+}}  after "a":  {{[ab]*}}      after "b": {}, which matches nothing
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from plait.constrained.regex.automaton_writer import minimized, write_automaton
from plait.constrained.regex.char_classes import Ranges, merge_ranges, named_ranges
from plait.constrained.regex.python_syntax import CLASS_FLAGS, MAXREPEAT, ParseItem, PlainPattern, PlainPatternWriter
from plait.constrained.regex.utf8_rows import split_classes
from plait.constrained.specs import GrammarError

MAX_STATES = 1_000
MAX_TRANSITIONS = 8_000  # from a state by a class of characters
MAX_DERIVATIVES = 60_000  # calls of `_derive`
TOO_MANY_STATES = "the automaton of its pattern has too many states"
MAX_ASCII = 127
MAX_CONJUNCTIONS = 200  # in one state
_NEWLINE: Ranges = ((10, 10),)


class Node(NamedTuple):
    """A part of a pattern. `kind`: chars, or, repeat, start, end, boundary, ahead, behind."""

    kind: str
    inner: tuple[Any, ...] = ()  # the alternatives, each a sequence of nodes
    chars: frozenset[int] = frozenset()  # indices of character classes
    low: int = 0  # repeats
    high: int = -1  # -1: no limit
    negated: bool = False
    number: int = 0  # index of a lookbehind
    if_unknown: bool = False  # whether a boundary holds next to a character of which this is not known


Sequence: TypeAlias = tuple[Node, ...]
Conjunction: TypeAlias = frozenset[Any]
"""Continuations, all of which must match the rest of the text: sequences, and ("not", state)."""
State: TypeAlias = frozenset[Conjunction]


class Position(NamedTuple):
    """The properties of a position in a text that assertions depend on.

    Dialects of JSON Schema's patterns differ on which characters beyond ASCII belong to words, so next to one neither
    `\\b` nor `\\B` matches there; within negative lookaround both match, so that no text is accepted by mistake.
    """

    is_start: bool
    before: str  # the kind of the character before it: "word", "other" (also at the start), or "unknown"
    lookbehinds: tuple[bool, ...]  # for each lookbehind, whether a text before the position matches it


def with_lookaround(items: list[ParseItem], source: str) -> PlainPattern:
    """Returns a plain pattern of the texts in which a parsed pattern of JSON Schema is found.

    `items`: the parse tree of the pattern `source`, which serves for error positions only. Raises GrammarError if it is
    too large.

    >>> import re._parser as parser
    >>> with_lookaround(list(parser.parse(r"^(?!b)[ab]\\Z")), "").pattern
    '[\\\\U00000061]'
    """
    pattern = _pattern_of(*lookaround_table(items, source, None))
    return PlainPattern(pattern, len(pattern), float(pattern.count("\\U")))


def lookaround_table(
    items: list[ParseItem], source: str, flags: int | None
) -> tuple[list[list[int]], set[int], list[Ranges]]:
    """Returns the minimal automaton of the texts in which a parsed pattern is found, see `with_lookaround`.

    flags: those of Python's `re`, whose words may have characters beyond ASCII; None: the pattern is one of JSON
    Schema. Returns the target of each class of characters for each state, of which 0 is the first; the accepting
    states; the classes.
    """
    return _Builder(items, source, flags).automaton().table()


class _Builder:
    """Translates the parse tree to nodes. Characters that the pattern does not distinguish form one class."""

    def __init__(self, items: list[ParseItem], source: str, flags: int | None) -> None:
        self._writer = PlainPatternWriter(source)
        self._sets: dict[Ranges, None] = {}
        self._flags = int(re.ASCII) if flags is None else flags
        self._knows_words = flags is not None  # beyond ASCII too
        self._word = merge_ranges(list(named_ranges(r"\w", self._flags & CLASS_FLAGS)), negated=False)
        self._in_negative, self._has_boundary = 0, False
        self._collect(items)
        words = [self._word, ((0, MAX_ASCII),)] if self._has_boundary else []
        every = merge_ranges([], negated=True)
        self._classes = [ranges for ranges, _ in split_classes([every, *self._sets, *words])]
        self._every = frozenset(range(len(self._classes)))
        self._lookbehinds: list[Sequence] = []
        self.any_text = Node("repeat", ((Node("chars", chars=self._every),),))
        self._root = (self.any_text, *self._sequence(items), self.any_text)

    def automaton(self) -> _Automaton:
        lookbehinds = [(self.any_text, *sequence) for sequence in self._lookbehinds]
        words = self._members(self._word)
        kinds = ["other"] * len(self._classes)
        if self._has_boundary:
            for index, ranges in enumerate(self._classes):
                is_unknown = ranges[0][0] > MAX_ASCII and not self._knows_words
                kinds[index] = "word" if index in words else "unknown" if is_unknown else "other"
        return _Automaton(self._root, lookbehinds, self._classes, kinds, self.any_text)

    def _collect(self, items: list[ParseItem]) -> None:
        for op, value in items:
            match str(op):
                case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                    self._sets[self._ranges(str(op), value)] = None
                case "MAX_REPEAT" | "MIN_REPEAT":
                    self._collect(list(value[2]))
                case "SUBPATTERN":
                    with self._group_flags(value):
                        self._collect(list(value[3]))
                case "AT":
                    self._has_boundary |= "BOUNDARY" in str(value)
                    if str(value) == "AT_END":
                        self._sets[_NEWLINE] = None
                case "BRANCH":
                    for arm in value[1]:
                        self._collect(list(arm))
                case "ASSERT" | "ASSERT_NOT":
                    self._collect(list(value[1]))

    def _ranges(self, op: str, value: Any) -> Ranges:
        return self._writer.character_ranges(op, value, self._flags)

    @contextmanager
    def _group_flags(self, value: Any) -> Iterator[None]:
        """Sets the flags that a group adds or removes."""
        outer = self._flags
        self._flags = (outer | value[1]) & ~value[2]
        yield
        self._flags = outer

    def _members(self, ranges: Ranges) -> frozenset[int]:
        return frozenset(index for index, own in enumerate(self._classes) if _contains(ranges, own[0][0]))

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
            case "SUBPATTERN":
                with self._group_flags(value):
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
                if _has_lookahead(inner):
                    raise GrammarError("$ or lookahead within lookbehind is not supported")
                self._lookbehinds.append(inner)
                return (Node("behind", negated=op == "ASSERT_NOT", number=len(self._lookbehinds) - 1),)
            case "AT" if not self._flags & re.MULTILINE or str(value) not in ("AT_BEGINNING", "AT_END"):
                if str(value) == "AT_END":  # also before a line feed at the end
                    line_feed = Node("repeat", ((Node("chars", chars=self._members(_NEWLINE)),),), high=1)
                    return (Node("ahead", ((line_feed, Node("end")),)),)
                kinds = {"AT_BEGINNING": "start", "AT_BEGINNING_STRING": "start", "AT_END_STRING": "end"}
                kinds |= {"AT_BOUNDARY": "boundary", "AT_NON_BOUNDARY": "boundary"}
                if str(value) in kinds:
                    is_odd = self._in_negative % 2 == 1  # what must not match then matches more, not less
                    return (Node(kinds[str(value)], negated=str(value) == "AT_NON_BOUNDARY", if_unknown=is_odd),)
        raise self._writer.refusal(str(value) if op == "AT" else op)


class _Automaton:
    def __init__(
        self, root: Sequence, lookbehinds: list[Sequence], classes: list[Ranges], kinds: list[str], any_text: Node
    ) -> None:
        self._classes, self._kinds, self._any_text, self._work = classes, kinds, any_text, 0
        self._root = _single(root)
        self._lookbehinds: tuple[State, ...] = tuple(_single(sequence) for sequence in lookbehinds)

    def table(self) -> tuple[list[list[int]], set[int], list[Ranges]]:
        """Returns the target of each class of characters for each state (0: the first), the finals, and the classes."""
        initial = (self._root, self._lookbehinds, True, "other")
        numbers: dict[Any, int] = {initial: 0}
        todo, table, finals = [initial], list[list[int]](), set[int]()
        while todo:
            added = []
            for state, lookbehinds, is_start, before in todo:
                if self._matches_end(state, self._position(lookbehinds, is_start, before, None), None):
                    finals.add(len(table))
                row = []
                positions = {kind: self._position(lookbehinds, is_start, before, kind) for kind in set(self._kinds)}
                for char, kind in enumerate(self._kinds):
                    position = positions[kind]
                    target = (
                        self._next_state(state, position, char),
                        tuple(self._next_state(lookbehind, position, char) for lookbehind in lookbehinds),
                        False,
                        kind,
                    )
                    if target not in numbers:
                        numbers[target] = len(numbers)
                        added.append(target)
                    row.append(numbers[target])
                table.append(row)
                if len(numbers) > MAX_STATES or len(table) * len(self._classes) > MAX_TRANSITIONS:
                    raise GrammarError(TOO_MANY_STATES)
            todo = added
        return (*minimized(table, finals), self._classes)

    def _position(self, lookbehinds: tuple[State, ...], is_start: bool, before: str, after: str | None) -> Position:
        """`after`: the kind of the next character, on which the end of a lookbehind may depend; None: the text ends."""
        position = Position(is_start, before, ())
        for state in lookbehinds:  # one may refer to those before it, which are within it
            position = position._replace(lookbehinds=(*position.lookbehinds, self._matches_end(state, position, after)))
        return position

    def _next_state(self, state: State, position: Position, char: int) -> State:
        """Returns the state after one more character."""
        targets: set[Conjunction] = set()
        for conjunction in state:
            cases: set[Conjunction] = {frozenset()}
            for continuation in conjunction:
                cases = _conjoin(cases, self._advance(continuation, position, char))
                if not cases:
                    break
            targets |= cases
            if len(targets) > MAX_CONJUNCTIONS:
                raise GrammarError(TOO_MANY_STATES)
        return _minimal(targets)

    def _advance(self, continuation: Any, position: Position, char: int) -> set[Conjunction]:
        """Returns what must match after a character, so that a continuation matches from the position before it."""
        if continuation[:1] != ("not",):
            return self._derive(continuation, position, char, frozenset())
        rest = self._next_state(continuation[1], position, char)
        if not rest:  # it can no longer match, so its negation does
            return {frozenset()}
        return set() if frozenset() in rest else {frozenset((("not", rest),))}

    def _derive(
        self, sequence: Sequence, position: Position, char: int, seen: frozenset[tuple[int, ...]]
    ) -> set[Conjunction]:
        """`_advance` for a sequence: its partial derivative by the character (Antimirov 1996).

        `seen`: the sequences of repeats that led here without a character, by the ids of their nodes (hashes of nodes
        would take most of the time); they would only repeat its result.
        """
        self._work += 1
        if self._work > MAX_DERIVATIVES:
            raise GrammarError(TOO_MANY_STATES)
        if not sequence:
            return set()
        node, rest = sequence[0], sequence[1:]
        if not rest and node == self._any_text:
            return {frozenset()}
        match node.kind:
            case "chars":
                if char not in node.chars:
                    return set()
                return {frozenset() if len(rest) == 1 and rest[0] == self._any_text else frozenset((rest,))}
            case "or":
                return {case for arm in node.inner for case in self._derive((*arm, *rest), position, char, seen)}
            case "repeat":
                key = tuple(map(id, sequence))
                if key in seen:
                    return set()
                seen |= {key}
                skipped = set() if node.low else self._derive(rest, position, char, seen)
                return skipped | self._derive((*node.inner[0], *_further_repeats(node), *rest), position, char, seen)
            case "end":
                return set()
            case "ahead" if not node.negated:
                ahead = self._derive(node.inner[0], position, char, frozenset())
                return _conjoin(ahead, self._derive(rest, position, char, seen)) if ahead else set()
            case "ahead":
                ahead = self._advance(("not", _single(node.inner[0])), position, char)
                return _conjoin(ahead, self._derive(rest, position, char, seen))
        holds = self._assertion_holds(node, position, self._kinds[char])
        return self._derive(rest, position, char, seen) if holds else set()

    def _assertion_holds(self, node: Node, position: Position, after: str) -> bool:
        """`after`: the kind of the character after the position."""
        if node.kind == "start":
            return position.is_start
        if node.kind == "boundary":
            if "unknown" in (position.before, after):
                return node.if_unknown
            return (position.before != after) != node.negated
        return position.lookbehinds[node.number] != node.negated

    def _matches_end(self, state: State, position: Position, after: str | None) -> bool:
        """Returns whether the state accepts at the position, before a character of this kind or at the end (None)."""
        return any(
            all(self._matches_empty(continuation, position, after, frozenset()) for continuation in conjunction)
            for conjunction in state
        )

    def _matches_empty(
        self, continuation: Any, position: Position, after: str | None, seen: frozenset[Sequence]
    ) -> bool:
        """Returns whether a continuation matches the empty text at the position."""
        if not continuation:
            return True
        if continuation[:1] == ("not",):
            return not self._matches_end(continuation[1], position, after)
        node, rest = continuation[0], continuation[1:]
        if continuation in seen or node.kind == "chars":
            return False
        seen = seen | {continuation}
        match node.kind:
            case "or":
                return any(self._matches_empty((*arm, *rest), position, after, seen) for arm in node.inner)
            case "repeat":
                if not node.low and self._matches_empty(rest, position, after, seen):
                    return True
                repeated = (*node.inner[0], *_further_repeats(node), *rest)
                return self._matches_empty(repeated, position, after, seen)
            case "ahead":
                ahead = self._matches_empty(node.inner[0], position, after, frozenset())
                return ahead != node.negated and self._matches_empty(rest, position, after, seen)
        if not self._matches_empty(rest, position, after, seen):
            return False
        if node.kind == "end":
            return after is None
        return self._assertion_holds(node, position, after or "other")


def _has_lookahead(sequence: Sequence) -> bool:
    return any(node.kind == "ahead" or any(map(_has_lookahead, node.inner)) for node in sequence)


def _single(sequence: Sequence) -> State:
    return frozenset((frozenset((sequence,)),))


def _further_repeats(node: Node) -> Sequence:
    """Returns what is left of a repeat after one repetition."""
    if node.high in (0, 1) or (node.low == 0 and node.high < 0):
        return (node,) if node.high < 0 else ()
    return (node._replace(low=max(0, node.low - 1), high=node.high - 1 if node.high > 0 else -1),)


def _conjoin(one: set[Conjunction], other: set[Conjunction]) -> set[Conjunction]:
    if len(one) * len(other) > MAX_CONJUNCTIONS:
        raise GrammarError(TOO_MANY_STATES)
    return {a | b for a in one for b in other}


def _minimal(conjunctions: set[Conjunction]) -> State:
    """Removes conjunctions that require more than another one."""
    kept: list[Conjunction] = []
    for conjunction in sorted(conjunctions, key=len):
        if not any(other <= conjunction for other in kept):
            kept.append(conjunction)
    return frozenset(kept)


def _contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _pattern_of(table: list[list[int]], finals: set[int], classes: list[Ranges]) -> str:
    edges: dict[int, dict[int, Ranges]] = {}
    for state, row in enumerate(table):
        spans: dict[int, list[tuple[int, int]]] = {}
        for char, target in enumerate(row):
            spans.setdefault(target, []).extend(classes[char])
        edges[state] = {target: merge_ranges(ranges, negated=False) for target, ranges in spans.items()}
    return write_automaton(0, finals, edges)
