"""Divides recursive GBNF rules into lexemes: patterns as large as llguidance's lexer can split a text into.

The lexer is greedy: it takes the longest match of the lexemes that may stand at a place, and all lexemes that match it.
The grammar means the same if no lexeme can go on where another one that may stand at the same place has matched, and
what may follow that one begins with the same byte. Where this is not so the longer lexeme is divided, down to single
characters, which never go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import product

import numpy as np
from numpy.typing import NDArray

from plait.constrained.cfg.gbnf_parser import Alternatives, CharClass, Node, Repeat, RuleReference, Sequence, TokenSet
from plait.constrained.cfg.gbnf_patterns import PatternWriter
from plait.constrained.cfg.gbnf_recursion import EMPTY, NEVER, Rules, one_of, references, regular_rules, sequence
from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.glushkov import Fragment
from plait.constrained.regex.small_dfa import build_small_dfa, reached_pairs
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.byte_trie import Int32Array
from plait.constrained.tokens.vocabulary import Vocabulary

MAX_ROUNDS = 40
MAX_LEXEMES = 200  # more are divided into characters
MAX_ARMS = 8  # of a sequence with optional parts
MAX_PAIRS = 20_000  # of states of two lexemes
_CLASH = (
    "where {} may stand, another token or a text with the same beginning may stand too; only one of them is followed"
)


@dataclass
class Lexeme:
    """A lexeme: its pattern, the nodes with this pattern, the lexemes that may follow it. `tokens`: it is one of these
    tokens instead, and its pattern is their notation."""

    pattern: str
    nodes: set[Node] = field(default_factory=set)
    tokens: TokenSet | None = None
    follow: set[str] = field(default_factory=set)


class LexemeGrammar:
    """Rules over lexemes: in `rules` a reference to `/pattern/` takes the place of each regular part.

    Raises GrammarError if at one place a token may stand and a text that could begin with it.

    >>> LexemeGrammar(without_end_recursion(parse_gbnf(text)), vocabulary).to_lark()  # doctest: +SKIP
    """

    def __init__(self, rules: Rules, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._regular = regular_rules(rules)
        self._source = rules
        self._writer = PatternWriter(rules)
        self._divided: set[Node] = set()
        self._only_characters = False
        for at in range(MAX_ROUNDS + 1):
            self._only_characters |= at == MAX_ROUNDS
            self.lexemes: dict[str, Lexeme] = {}
            self.rules = {n: self._divide(self._regrouped(node)) for n, node in rules.items() if n not in self._regular}
            if self._only_characters:
                if any(lexeme.tokens is not None for lexeme in self.lexemes.values()):
                    self._conflicts()
                return
            if len(self.lexemes) > MAX_LEXEMES:
                self._only_characters = True
            elif divided := self._conflicts():
                self._divided |= divided
            else:
                return

    def to_lark(self) -> str:
        """Returns the grammar in llguidance's notation."""
        names = {name: f"r{at}" for at, name in enumerate(self.rules)}
        tokens = {name: name for name, lexeme in self.lexemes.items() if lexeme.tokens is not None}
        terminals = {name: f"T{at}" for at, name in enumerate(self.lexemes) if name not in tokens}
        optional = {name: f"{terminal}?" for name, terminal in terminals.items() if _is_optional(name)}

        def write(node: Node) -> str:
            match node:
                case RuleReference():
                    return (names | terminals | optional | tokens)[node.name]
                case Sequence():
                    return " ".join(map(write, node.parts)) or '""'
                case Alternatives():
                    return f"({' | '.join(map(write, node.alternatives))})"
                case Repeat():
                    return f"({write(node.part)}){{{node.low},{'' if node.high is None else node.high}}}"
            raise AssertionError(node)

        lines = [f"{names[name]}: {write(node)}" for name, node in self.rules.items()]
        lines += [f"{terminals[n]}: {n}{' & /(?s:.)+/' if n in optional else ''}" for n in terminals]
        return "\n".join([f"start: {names['root']}", *lines])

    def _is_regular(self, node: Node) -> bool:
        return not isinstance(node, TokenSet) and all(one.name in self._regular for one in references(node))

    def _regrouped(self, node: Node) -> Node:
        """Writes a node so that its regular parts stand together: (r|i)* as r* (i r*)*, and r i? r as r i r | r r."""
        match node:
            case Alternatives():
                return one_of(map(self._regrouped, node.alternatives))
            case Repeat(part, 0, None) if isinstance(inner := self._regrouped(part), Alternatives):
                regular = one_of(arm for arm in inner.alternatives if self._is_regular(arm))
                others = one_of(arm for arm in inner.alternatives if not self._is_regular(arm))
                if NEVER not in (regular, others):
                    loop = Repeat(regular, 0, None)
                    return sequence((loop, Repeat(sequence((others, loop)), 0, None)))
            case Repeat():
                return Repeat(self._regrouped(node.part), node.low, node.high)
            case Sequence():
                choices = [self._choices(self._regrouped(part)) for part in node.parts]
                if 1 < np.prod([len(some) for some in choices]) <= MAX_ARMS:
                    return one_of(map(sequence, product(*choices)))
                return sequence(self._regrouped(part) for part in node.parts)
        return node

    def _choices(self, part: Node) -> tuple[Node, ...]:
        if not isinstance(part, Repeat) or part.low or self._is_regular(part):
            return (part,)
        return (EMPTY,) if part.high == 0 else (Repeat(part.part, 1, part.high), EMPTY)

    def _divide(self, node: Node) -> Node:
        if self._is_regular(node) and not self._must_divide(node):
            return self._lexeme(node)
        match node:
            case RuleReference():
                return self._divide(self._source[node.name]) if node.name in self._regular else node
            case Sequence():
                return sequence(map(self._divide, self._runs(node.parts)))
            case Alternatives():
                regular = [arm for arm in node.alternatives if self._is_regular(arm)]
                others = [arm for arm in node.alternatives if not self._is_regular(arm)]
                together = one_of(regular)
                arms = regular if self._must_divide(together) else [together]
                return one_of(map(self._divide, [*arms, *others] if regular else others))
            case Repeat():
                return Repeat(self._divide(node.part), node.low, node.high)
            case TokenSet():
                self.lexemes.setdefault(node.lark, Lexeme(node.lark, tokens=node))
                return RuleReference(node.lark, 0)
        return self._lexeme(node)

    def _must_divide(self, node: Node) -> bool:
        return node in self._divided or (self._only_characters and not isinstance(node, CharClass))

    def _runs(self, parts: Iterable[Node]) -> list[Node]:
        """Returns the parts of a sequence, where regular ones in a row are one part unless that must be divided."""
        runs: list[list[Node]] = []
        for part in parts:
            if runs and self._is_regular(part) and self._is_regular(runs[-1][0]):
                runs[-1].append(part)
            else:
                runs.append([part])
        return [one for run in runs for one in (run if self._must_divide(sequence(run)) else [sequence(run)])]

    def _lexeme(self, node: Node) -> Node:
        name = f"/{self._writer.plain(node).pattern}/"
        if name == "//":
            return EMPTY
        try:
            _dfa(name)
        except DfaTooLarge:
            if isinstance(node, CharClass):
                raise GrammarError("the grammar is too large once it is written out") from None
            self._divided.add(node)
            return self._divide(node)
        self.lexemes.setdefault(name, Lexeme(name)).nodes.add(node)
        return RuleReference(name, 0)

    def _conflicts(self) -> set[Node]:
        """Returns the nodes of lexemes that may go on where another one has ended."""
        together: dict[str, set[str]] = {name: set() for name in self.lexemes}
        todo: list[tuple[str, str]] = []

        def add(some: Iterable[str], others: Iterable[str]) -> None:
            for one in some:
                new = set(others) - together[one]
                together[one] |= new
                todo.extend((one, other) for other in new)

        begin = self._follow()
        for group in [begin, *(lexeme.follow for lexeme in self.lexemes.values())]:
            add(group, group)
        next_bytes = {name: self._first_bytes(lexeme.follow) for name, lexeme in self.lexemes.items()}
        divided: set[Node] = set()
        while todo:
            one, two = todo.pop()
            if self.lexemes[one].tokens is not None or self.lexemes[two].tokens is not None:
                self._check_tokens(self.lexemes[one], self.lexemes[two])
                continue
            share, goes_on = _compare(one, two)
            if (goes_on & next_bytes[one]).any():
                divided |= {node for node in self.lexemes[two].nodes if not isinstance(node, CharClass)}
            if share:
                add(self.lexemes[one].follow, self.lexemes[two].follow)
        return divided

    def _first_bytes(self, names: Iterable[str]) -> NDArray[np.bool_]:
        found = np.zeros(256, np.bool_)
        for name in names:
            tokens = self.lexemes[name].tokens
            if tokens is None:
                found |= _dfa(name)[0][0] >= 0
            elif tokens.negated:
                found[:] = True
            else:
                found[[text[0] for text in self._texts(tokens)]] = True
        return found

    def _texts(self, tokens: TokenSet) -> list[bytes]:
        """Returns the texts of the tokens that have one."""
        return [text for token in tokens.ids if (text := self._vocabulary.token_bytes[token])]

    def _check_tokens(self, one: Lexeme, other: Lexeme) -> None:
        """Raises GrammarError if both may stand at a place, and llguidance would follow one of them only."""
        if one.tokens is None:
            one, other = other, one
        if one.pattern == other.pattern or one.tokens is None:
            return
        if other.tokens is not None:
            sets = one.tokens, other.tokens
            positive = [tokens for tokens in sets if not tokens.negated]
            clash = len(positive) == 0 or any(
                (token in sets[0].ids) is not sets[0].negated and (token in sets[1].ids) is not sets[1].negated
                for token in positive[0].ids
            )
        elif one.tokens.negated:
            clash = bool((_dfa(other.pattern)[0][0] >= 0).any())
        else:
            clash = any(_may_begin(other.pattern, text) for text in self._texts(one.tokens))
        if clash:
            raise GrammarError(_CLASH.format(one.pattern if not one.tokens.negated else "a token with !"))

    def _follow(self) -> frozenset[str]:
        """Finds the lexemes that may follow each one; returns those with which a text may begin."""
        ends = {name: Fragment[str](is_optional=False) for name in self.rules}
        ends |= {
            name: Fragment(frozenset({name}), frozenset({name}), lexeme.tokens is None and _is_optional(name))
            for name, lexeme in self.lexemes.items()
        }

        def of(node: Node) -> Fragment[str]:
            match node:
                case RuleReference():
                    return ends[node.name]
                case Alternatives():
                    return Fragment.either(map(of, node.alternatives))
                case Repeat():
                    inner = of(node.part)
                    whole = joined(inner, inner) if node.high != 1 else inner
                    return whole._replace(is_optional=inner.is_optional or node.low == 0)
                case Sequence():
                    return reduce(joined, map(of, node.parts), Fragment[str]())
            raise AssertionError(node)

        def joined(one: Fragment[str], two: Fragment[str]) -> Fragment[str]:
            for name in one.last:
                self.lexemes[name].follow |= two.first
            return one.then(two)

        while (new := ends | {name: of(node) for name, node in self.rules.items()}) != ends:
            ends = new
        return ends["root"].first


@lru_cache(maxsize=1024)
def _dfa(name: str) -> tuple[Int32Array, NDArray[np.bool_]]:
    """Returns the automaton of a pattern over bytes: next states [S, 256], -1 for none, and accepting [S]."""
    states, _, accepting = build_small_dfa(name[1:-1])
    return states, accepting


def _is_optional(name: str) -> bool:
    return bool(_dfa(name)[1][0])


def _may_begin(name: str, text: bytes) -> bool:
    """Returns whether a text of a pattern begins with `text`, or `text` with a text of the pattern."""
    states, accepting = _dfa(name)
    at = 0
    for byte in text:
        at = int(states[at, byte])
        if at < 0 or accepting[at]:
            return at >= 0
    return True


@lru_cache(maxsize=4096)
def _compare(one: str, two: str) -> tuple[bool, NDArray[np.bool_]]:
    """Returns whether two patterns share a text, and the bytes with which the second goes on behind a text of the
    first [256]; the empty text does not count."""
    (states, accepting), (others, other_accepting) = _dfa(one), _dfa(two)
    share, goes_on = False, np.zeros(256, np.bool_)
    try:
        for state, other in reached_pairs(states, others, MAX_PAIRS):
            if accepting[state]:
                share |= bool(other_accepting[other])
                goes_on |= others[other] >= 0
    except DfaTooLarge:
        return True, np.ones(256, np.bool_)
    return share, goes_on
