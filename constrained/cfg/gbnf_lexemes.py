"""Divides GBNF rules with recursion into lexemes: patterns as large as llguidance's lexer can split a text into.

The lexer is greedy: it takes the longest match of any lexeme that may stand at a place, and all lexemes that match it.
That is what the grammar means only if no lexeme can go on where another one that may stand at the same place has
matched, and what may follow that one begins with the same byte. Where this is not so, the longer lexeme is divided,
down to single characters, which never go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.constrained.byte_trie import Int32Array
from plait.constrained.cfg.gbnf_parser import Alternatives, CharClass, Node, Repeat, RuleReference, Sequence
from plait.constrained.cfg.gbnf_patterns import PatternWriter
from plait.constrained.cfg.gbnf_recursion import (
    EMPTY,
    NEVER,
    Rules,
    is_nullable,
    not_empty,
    nullable_rules,
    one_of,
    recursive_rules,
    references,
    sequence,
)
from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.small_dfa import build_small_dfa
from plait.constrained.specs import GrammarError

MAX_ROUNDS = 40
MAX_LEXEMES = 1_000
MAX_ARMS = 8  # of a sequence with optional parts
MAX_PAIRS = 20_000  # of states of two lexemes

Dfa: TypeAlias = tuple[Int32Array, NDArray[np.bool_]]
Part: TypeAlias = Any
"""None (the empty text), a Lexeme, a RuleReference, ("one of", parts), ("sequence", parts) or
("repeat", [part], low, high)."""


@dataclass(frozen=True, eq=False)
class Lexeme:
    """One place of a lexeme: its pattern, without the empty text, which it matches too if `is_optional`."""

    pattern: str
    is_optional: bool
    source: Node


@dataclass
class _Ends:
    """The lexemes with which a part may begin and end, and whether it matches the empty text."""

    first: set[Lexeme] = field(default_factory=set)
    last: set[Lexeme] = field(default_factory=set)
    is_optional: bool = False


class LexemeGrammar:
    """Rules over lexemes, by the name of their rule: nodes in which a Lexeme takes the place of a regular part.

    Raises GrammarError if the rules are too large.

    >>> LexemeGrammar(without_end_recursion(parse_gbnf(text))).to_lark()  # doctest: +SKIP
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._nullable = nullable_rules(rules)
        recursive = recursive_rules(rules)
        reaching = {name for name in rules if recursive & _closure(name, rules)}
        self._irregular = reaching | recursive
        self._rules = {n: self._regrouped(node) if n in self._irregular else node for n, node in rules.items()}
        self._patterns = PatternWriter({name: node for name, node in rules.items() if name not in self._irregular})
        self._divided: set[Node] = set()
        for _ in range(MAX_ROUNDS):
            self._read()
            divided = self._conflicts()
            if not divided:
                return
            self._divided |= divided
        raise GrammarError("its texts can be divided in too many ways")

    def _regrouped(self, node: Node) -> Node:
        """Writes a node so that its regular parts stand together: (r|i)* as r* (i r*)*, and r i? r as r i r | r r."""
        match node:
            case Alternatives():
                return one_of(map(self._regrouped, node.alternatives))
            case Repeat():
                inner = self._regrouped(node.part)
                if not isinstance(inner, Alternatives) or node.high is not None or node.low > 1:
                    return Repeat(inner, node.low, node.high)
                regular = one_of(arm for arm in inner.alternatives if self._is_regular(arm))
                others = one_of(arm for arm in inner.alternatives if not self._is_regular(arm))
                if regular == NEVER or others == NEVER:
                    return Repeat(inner, node.low, node.high)
                loop = Repeat(regular, 0, None)
                more = sequence((others, loop))
                if node.low == 0:
                    return sequence((loop, Repeat(more, 0, None)))
                one = sequence((regular, loop, Repeat(more, 0, None)))
                return one_of((one, Repeat(more, 1, None)))
            case Sequence():
                return self._with_optional_written([self._regrouped(part) for part in node.parts])
        return node

    def _with_optional_written(self, parts: list[Node]) -> Node:
        whole, arms = sequence(parts), [list[Node]()]
        for at, part in enumerate(parts):
            is_between = 0 < at < len(parts) - 1 and self._is_regular(parts[at - 1]) and self._is_regular(parts[at + 1])
            if not is_between or self._is_regular(part) or not is_nullable(part, self._nullable):
                arms = [[*arm, part] for arm in arms]
                continue
            inner = not_empty(part, self._rules, self._nullable, self._irregular)
            arms = [[*arm, *more] for arm in arms for more in ([inner], [])]
            if len(arms) > MAX_ARMS:
                return whole
        return one_of(map(sequence, arms))

    def _read(self) -> None:
        self.lexemes: list[Lexeme] = []
        self.parts = {name: self._divide(node) for name, node in self._rules.items() if name in self._irregular}
        if len(self.lexemes) > MAX_LEXEMES:
            raise GrammarError("the grammar has too many parts")

    def _is_regular(self, node: Node) -> bool:
        return all(one.name not in self._irregular for one in references(node))

    def _divide(self, node: Node) -> Part:
        if self._is_regular(node) and node not in self._divided:
            return self._lexeme(node)
        match node:
            case RuleReference():
                return node if node.name in self._irregular else self._divide(self._rules[node.name])
            case Sequence():
                return ("sequence", [self._divide(part) for part in self._runs(node.parts)])
            case Alternatives():
                regular = [arm for arm in node.alternatives if self._is_regular(arm)]
                others = [arm for arm in node.alternatives if not self._is_regular(arm)]
                together = one_of(regular)
                arms = regular if together in self._divided else [together] if regular else []
                return ("one of", [self._divide(arm) for arm in (*arms, *others)])
            case Repeat():
                return ("repeat", [self._divide(node.part)], node.low, node.high)
        return self._lexeme(node)

    def _runs(self, parts: Iterable[Node]) -> list[Node]:
        """Returns the parts of a sequence, where regular ones in a row are one part unless that must be divided."""
        runs: list[list[Node]] = []
        for part in parts:
            if self._is_regular(part) and runs and self._is_regular(runs[-1][0]):
                runs[-1].append(part)
            else:
                runs.append([part])
        found: list[Node] = []
        for run in runs:
            whole = sequence(run)
            found += run if whole in self._divided else [whole]
        return found

    def _lexeme(self, node: Node) -> Part:
        """Returns the lexeme of a regular node; None if it matches only the empty text."""
        inner = not_empty(node, self._rules, self._nullable)
        if inner in (NEVER, EMPTY):
            return None
        pattern = self._patterns.plain(inner).pattern
        try:
            lexeme_dfa(pattern)
        except DfaTooLarge:
            if isinstance(node, CharClass) or node in self._divided:
                raise GrammarError("the grammar is too large once it is written out") from None
            self._divided.add(node)
            return self._divide(node)
        found = Lexeme(pattern, inner != node, node)
        self.lexemes.append(found)
        return found

    def _conflicts(self) -> set[Node]:
        """Returns the nodes of lexemes that may go on where another one has ended."""
        follow = self._follow()
        index = {lexeme: at for at, lexeme in enumerate(self.lexemes)}
        masks = [sum(1 << index[one] for one in follow[lexeme]) for lexeme in self.lexemes]
        together = [0] * len(self.lexemes)
        todo: list[tuple[int, int]] = []

        def add(some: int, others: int) -> None:
            for one in _bits(some):
                for other in _bits(others & ~together[one]):
                    together[one] |= 1 << other
                    todo.append((one, other))

        begin = sum(1 << index[one] for one in self._ends["root"].first)
        add(begin, begin)
        for at, mask in enumerate(masks):
            add(mask, mask)
            add(1 << at, 1 << at)
        next_bytes = [_first_bytes([one.pattern for one in follow[lexeme]]) for lexeme in self.lexemes]
        divided = set[Node]()
        while todo:
            at, other = todo.pop()
            one, two = self.lexemes[at], self.lexemes[other]
            if isinstance(two.source, CharClass) and isinstance(one.source, CharClass) and at == other:
                continue
            share, goes_on = _compare(one.pattern, two.pattern)
            if not isinstance(two.source, CharClass) and (goes_on & next_bytes[at]).any():
                divided.add(two.source)
            if share:
                add(masks[at], masks[other])
        return divided

    def _follow(self) -> dict[Lexeme, set[Lexeme]]:
        """Returns the lexemes that may follow each one, wherever it stands."""
        self._ends = {name: _Ends() for name in self.parts}
        follow: dict[Lexeme, set[Lexeme]] = {lexeme: set() for lexeme in self.lexemes}
        size = -1
        while size != (new := sum(len(e.first) + len(e.last) + e.is_optional for e in self._ends.values())):
            size = new
            for name, part in self.parts.items():
                self._ends[name] = self._ends_of(part, follow)
        for part in self.parts.values():
            self._ends_of(part, follow)
        return follow

    def _ends_of(self, part: Part, follow: dict[Lexeme, set[Lexeme]]) -> _Ends:
        match part:
            case None:
                return _Ends(is_optional=True)
            case Lexeme():
                return _Ends({part}, {part}, part.is_optional)
            case RuleReference():
                return self._ends[part.name]
            case ("one of", arms):
                inner = [self._ends_of(arm, follow) for arm in arms]
                return _Ends(
                    set().union(*(e.first for e in inner)),
                    set().union(*(e.last for e in inner)),
                    any(e.is_optional for e in inner),
                )
            case ("repeat", [inner_part], low, high):
                ends = self._ends_of(inner_part, follow)
                if high != 1:
                    for one in ends.last:
                        follow[one] |= ends.first
                return _Ends(ends.first, ends.last, ends.is_optional or low == 0)
            case ("sequence", parts):
                whole = _Ends(is_optional=True)
                for inner_part in parts:
                    ends = self._ends_of(inner_part, follow)
                    for one in whole.last:
                        follow[one] |= ends.first
                    first = whole.first | ends.first if whole.is_optional else whole.first
                    last = whole.last | ends.last if ends.is_optional else ends.last
                    whole = _Ends(set(first), set(last), whole.is_optional and ends.is_optional)
                return whole
        raise AssertionError(part)

    def to_lark(self) -> str:
        """Returns the grammar in llguidance's notation."""
        names = {name: f"r{at}" for at, name in enumerate(self.parts)}
        terminals: dict[str, str] = {}

        def write(part: Part) -> str:
            match part:
                case None:
                    return '""'
                case Lexeme():
                    name = terminals.setdefault(part.pattern, f"T{len(terminals)}")
                    return f"{name}?" if part.is_optional else name
                case RuleReference():
                    return names[part.name]
                case ("one of", arms):
                    return f"({' | '.join(map(write, arms))})"
                case ("repeat", [inner], low, high):
                    return f"({write(inner)}){{{low},{'' if high is None else high}}}"
                case ("sequence", parts):
                    return " ".join(map(write, parts)) or '""'
            raise AssertionError(part)

        lines = [f"{names[name]}: {write(part)}" for name, part in self.parts.items()]
        lines += [f"{name}: /{pattern}/" for pattern, name in terminals.items()]
        return "\n".join([f"start: {names['root']}", *lines])


def _closure(name: str, rules: Rules) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        new = {one.name for one in references(rules[todo.pop()])} - found
        found |= new
        todo += new
    return found


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@lru_cache(maxsize=1024)
def lexeme_dfa(pattern: str) -> Dfa:
    """Returns the automaton of a pattern over bytes: next states [S, 256], -1 for none, and accepting [S]."""
    states, _, accepting = build_small_dfa(pattern)
    return states, accepting


def _first_bytes(patterns: Iterable[str]) -> NDArray[np.bool_]:
    found = np.zeros(256, np.bool_)
    for pattern in patterns:
        found |= lexeme_dfa(pattern)[0][0] >= 0
    return found


@lru_cache(maxsize=4096)
def _compare(one: str, two: str) -> tuple[bool, NDArray[np.bool_]]:
    """Returns whether two patterns share a text, and the bytes with which the second goes on behind a text of the
    first [256]."""
    (states, accepting), (others, other_accepting) = lexeme_dfa(one), lexeme_dfa(two)
    todo, seen = [(0, 0)], {(0, 0)}
    share, goes_on = False, np.zeros(256, np.bool_)
    while todo:
        at, other = todo.pop()
        row, other_row = states[at], others[other]
        if accepting[at]:
            share |= bool(other_accepting[other])
            goes_on |= other_row >= 0
        both = (row >= 0) & (other_row >= 0)
        for pair in set(zip(row[both].tolist(), other_row[both].tolist(), strict=True)) - seen:
            seen.add(pair)
            todo.append(pair)
        if len(seen) > MAX_PAIRS:
            return True, np.ones(256, np.bool_)
    return share, goes_on
