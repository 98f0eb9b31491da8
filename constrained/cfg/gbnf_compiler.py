"""Compiles Ebnf: GBNF without recursion becomes one pattern, with recursion a grammar over lexemes.

Recursion at the beginning and end of rules becomes loops (gbnf_recursion.py). What is still recursive is divided into
lexemes as large as llguidance's lexer can take (gbnf_lexemes.py), and tried on long texts (below).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias

import llguidance

from plait.constrained.cfg.gbnf_lexemes import LexemeGrammar
from plait.constrained.cfg.gbnf_parser import (
    Alternatives,
    CharClass,
    Node,
    Repeat,
    RuleReference,
    Sequence,
    TokenSet,
    parse_gbnf,
)
from plait.constrained.cfg.gbnf_patterns import PatternWriter
from plait.constrained.cfg.gbnf_recursion import (
    NEVER,
    Rules,
    productive,
    reachable,
    regular_rules,
    without_end_recursion,
)
from plait.constrained.cfg.gbnf_tokens import encode_with_tokens, text_of_set, with_token_rules
from plait.constrained.cfg.lark_depth import check_depth
from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.guidance.inner_matcher import MAX_ITEMS, compile_inner_matcher
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.regex.char_classes import merge_ranges
from plait.constrained.regex.regex_compiler import ByteDfaBuilder, compile_plain_pattern
from plait.constrained.specs import Ebnf, GrammarError
from plait.constrained.tokens.vocabulary import Vocabulary


def compile_ebnf(
    spec: Ebnf, vocabulary: Vocabulary, build_byte_dfa: ByteDfaBuilder | None = None
) -> TokenDfa | LlguidanceSource:
    """Compiles a grammar, to an automaton if its texts are those of a pattern. Raises GrammarError with the index of an
    error, and for a grammar whose texts could be divided in more ways the longer they are.

    `build_byte_dfa` builds the automaton over bytes; see compile_plain_pattern.

    >>> compile_ebnf(Ebnf('root ::= "a"+'), vocabulary)                   # doctest: +SKIP
    """
    rules = reachable(with_token_rules(parse_gbnf(spec.grammar), vocabulary))
    if "root" not in regular_rules(rules):
        rules = reachable(without_end_recursion(reachable(productive(rules))))
    if rules["root"] == NEVER:
        raise GrammarError("the rule root matches no text: each alternative leads back to itself")
    if "root" in regular_rules(rules):
        return compile_plain_pattern(PatternWriter(rules).plain(rules["root"]), vocabulary, build_byte_dfa)
    lark = LexemeGrammar(rules, vocabulary).to_lark()
    try:
        check_depth(lark)
    except GrammarError as error:
        raise GrammarError(error.reason) from None  # its index is not one in the grammar that was given
    named = {token for node in rules.values() if isinstance(node, TokenSet) and not node.negated for token in node.ids}
    pairs = tuple((f"<[{token}]>", token) for token in sorted(named))
    source = LlguidanceSource(llguidance.LLMatcher.grammar_from_lark(lark), control_tokens=pairs)
    check_long_texts(rules, source.text, vocabulary)
    return ensure_compiles(source, vocabulary)


# -- gbnf trial -----------------------------------------------------------------------------------
# Tries a recursive grammar on long texts before it is used, so that llguidance gives up on it at once or never.
#
# A grammar may divide its texts in ever more ways (`root ::= "(" root ")" | "a"* "a"* root?`). llguidance keeps all of
# them, and gives up in the middle of an answer. So each loop and each recursion is repeated to a long text here.

SIZES = (0, 50, 100, 200, 400)  # repeated characters; items in proportion to them reach MAX_ITEMS at 4 x the last
ROW_ITEMS = 1_000  # for one place of such a text
MAX_TEXTS = 100
MAX_TEXT = 1_000  # characters before a repeated text; longer ones are cut and not tried
_GROWS = (
    "the rule {} divides its texts in more and more ways as they grow, so that no long answer could be finished; write "
    "a repetition as item* or (item separator)*, and leave no two optional or repeated parts in a row that begin alike"
)
_Repeated: TypeAlias = tuple[str, str, str]
"""A rule, a text that leads to it, and a text that may be repeated there."""


def check_long_texts(rules: Rules, source: str, vocabulary: Vocabulary) -> None:
    """Raises GrammarError if llguidance, with `source` in its notation, would give up on long texts of `rules`.

    >>> check_long_texts(rules, LexemeGrammar(rules).to_lark(), vocabulary)  # doctest: +SKIP
    """
    low, high = (compile_inner_matcher(source, vocabulary, most, ROW_ITEMS) for most in (MAX_ITEMS // 4, MAX_ITEMS))
    for name, before, body in islice(_Texts(rules, vocabulary).repeated(), MAX_TEXTS):
        size = _gives_up(low, vocabulary, before, body)
        if size == SIZES[0]:  # many items from the beginning: do they grow?
            size = _gives_up(high, vocabulary, before, body)
        if size is not None:
            raise GrammarError(_GROWS.format(name))


def _gives_up(start: llguidance.LLMatcher, vocabulary: Vocabulary, before: str, body: str) -> int | None:
    """Returns the first of SIZES at which the matcher gives up on `before` and repeats of `body`."""
    matcher = start.deep_copy()
    begin = before + 2 * body
    for size, last in zip(SIZES, (0, *SIZES), strict=False):
        more = body * (size // len(body) - last // len(body))
        tokens = encode_with_tokens(more if size else begin, lambda text: list(vocabulary.encode(text)))
        matcher.try_consume_tokens(tokens)
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()
        if matcher.is_error():
            return size
    return None


class _Texts:
    """Texts of a grammar."""

    def __init__(self, rules: Rules, vocabulary: Vocabulary) -> None:
        self._rules, self._vocabulary = rules, vocabulary
        self._shortest: dict[str, str] = {}
        before: dict[str, str] | None = None
        while before != self._shortest:
            before = dict(self._shortest)
            for name, node in reversed(rules.items()):
                if (text := self._short(node)) is not None:
                    self._shortest[name] = min(self._shortest.get(name, text), text, key=len)

    def repeated(self) -> Iterator[_Repeated]:
        """Yields each rule with a loop or a way back to itself, a text that leads there, and a text to repeat."""
        before = self._before("root") | {"root": ""}
        for name, text in before.items():
            if around := self._before(name, until=name).get(name):
                yield name, text, around
            for head, body in self._loops(self._rules[name], ""):
                yield name, text + head, body

    def _before(self, start: str, until: str | None = None) -> dict[str, str]:
        """Returns a text before each rule that is reached from `start` by one reference or more, or by those that lead
        to `until` by a text that is not empty."""
        found: dict[str, str] = {}
        todo = [("", start)]
        for text, name in todo:
            for head, inner in self._places(self._rules[name], text):
                if inner not in found:
                    todo.append((head, inner))
                if not found.get(inner):
                    found[inner] = head
            if until is not None and found.get(until):
                break
        return found

    def _short(self, node: Node) -> str | None:
        """Returns a shortest known text of a node, None if none is known yet."""
        match node:
            case CharClass():
                ranges = merge_ranges(list(node.ranges), node.negated)
                visible = [low for low, _ in ranges if low > 32]
                return chr((visible or [low for low, _ in ranges])[0]) if ranges else None
            case RuleReference():
                return self._shortest.get(node.name)
            case TokenSet():
                return text_of_set(node, self._vocabulary)
            case Sequence():
                parts = [self._short(part) for part in node.parts]
                return None if None in parts else "".join(part for part in parts if part is not None)[:MAX_TEXT]
            case Alternatives():
                arms = [text for arm in node.alternatives if (text := self._short(arm)) is not None]
                return min(arms, key=len, default=None)
            case Repeat():
                text = self._short(node.part) if node.low else ""
                return None if text is None else (text * min(node.low, MAX_TEXT))[:MAX_TEXT]
        return None

    def _places(self, node: Node, before: str) -> Iterator[tuple[str, str]]:
        """Yields the references in a node, each with a text before it."""
        for inner, text in self._within(node, before):
            yield from self._places(inner, text)
        if isinstance(node, RuleReference):
            yield before, node.name

    def _loops(self, node: Node, before: str) -> Iterator[tuple[str, str]]:
        """Yields a text before each unbounded loop in a node, and a text of each alternative of its body."""
        for inner, text in self._within(node, before):
            yield from self._loops(inner, text)
        if isinstance(node, Repeat) and node.high is None:
            bodies = node.part.alternatives if isinstance(node.part, Alternatives) else (node.part,)
            yield from ((before, body) for body in map(self._short, bodies) if body)

    def _within(self, node: Node, before: str) -> Iterator[tuple[Node, str]]:
        match node:
            case Sequence():
                for part in node.parts:
                    yield part, before
                    before = (before + (self._short(part) or ""))[:MAX_TEXT]
            case Alternatives():
                yield from ((arm, before) for arm in node.alternatives)
            case Repeat():
                yield node.part, before
