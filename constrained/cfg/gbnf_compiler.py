"""Compiles Ebnf: GBNF without recursion becomes one pattern, with recursion a grammar over single characters.

llguidance splits a text into terminals greedily, which GBNF does not; with terminals of one character there is nothing
to split.
"""

from __future__ import annotations

import llguidance

from plait.constrained.cfg.gbnf_parser import Alternatives, CharClass, Node, Repeat, RuleReference, Sequence, parse_gbnf
from plait.constrained.cfg.lark_depth import check_depth
from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, ensure_compiles
from plait.constrained.regex.char_classes import merge_ranges, write_class
from plait.constrained.regex.compiler import ByteDfaBuilder, compile_plain_pattern
from plait.constrained.regex.python_syntax import PlainPattern
from plait.constrained.specs import Ebnf, GrammarError
from plait.constrained.vocabulary import Vocabulary

MAX_LENGTH = 100_000
_TOO_LARGE = "the grammar is too large once it is written out"


def compile_ebnf(
    spec: Ebnf, vocabulary: Vocabulary, build_byte_dfa: ByteDfaBuilder | None = None
) -> TokenDfa | LlguidanceSource:
    """Compiles a grammar, to an automaton if it has no recursion. Raises GrammarError with the index of an error.

    `build_byte_dfa` builds the automaton over bytes; see compile_plain_pattern.

    >>> compile_ebnf(Ebnf('root ::= "a"+'), vocabulary)                   # doctest: +SKIP
    """
    rules = parse_gbnf(spec.grammar)
    if not _is_recursive(rules):
        return compile_plain_pattern(_PlainPatternBuilder(rules).plain(rules["root"]), vocabulary, build_byte_dfa)
    lines = [f"r{at}: {_to_lark(node, rules)}" for at, node in enumerate(rules.values())]
    lines.insert(0, f"start: r{list(rules).index('root')}")
    lark = "\n".join(lines)
    try:
        check_depth(lark)
    except GrammarError as error:
        raise GrammarError(error.reason) from None  # its index is not one in the grammar that was given
    return ensure_compiles(LlguidanceSource(llguidance.LLMatcher.grammar_from_lark(lark)), vocabulary)


def _references(node: Node) -> list[RuleReference]:
    match node:
        case RuleReference():
            return [node]
        case Repeat():
            return _references(node.part)
        case Sequence():
            return [reference for part in node.parts for reference in _references(part)]
        case Alternatives():
            return [reference for arm in node.alternatives for reference in _references(arm)]
        case CharClass():
            return []


def _is_recursive(rules: dict[str, Node]) -> bool:
    """Returns whether a rule reachable from `root` refers back to itself."""
    state: dict[str, bool] = {}  # False while a rule is being visited, True afterwards
    todo: list[tuple[str, bool]] = [("root", False)]
    while todo:
        name, done = todo.pop()
        if done:
            state[name] = True
        elif name not in state:
            state[name] = False
            todo.append((name, True))
            for reference in _references(rules[name]):
                if state.get(reference.name) is False:
                    return True
                todo.append((reference.name, False))
    return False


class _PlainPatternBuilder:
    """Writes non-recursive nodes as plain patterns, each rule once."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._patterns: dict[str, PlainPattern] = {}

    def plain(self, node: Node) -> PlainPattern:
        """Returns a node as a plain pattern. Raises GrammarError if it is too large."""
        match node:
            case CharClass():
                ranges = merge_ranges(list(node.ranges), node.negated)
                return PlainPattern(write_class(ranges), 1, 1 + len(ranges) / 4)
            case RuleReference():
                if node.name not in self._patterns:
                    self._patterns[node.name] = _check_size(self.plain(self._rules[node.name]), node.where)
                return self._patterns[node.name]
            case Sequence():
                return self._together("", node.parts)
            case Alternatives():
                return self._together("|", node.alternatives).wrap("(?:", ")")
            case Repeat():
                high = "" if node.high is None else node.high
                times = node.low + 1 if node.high is None else node.high
                return self.plain(node.part).wrap("(?:", f"){{{node.low},{high}}}", times)

    def _together(self, between: str, nodes: tuple[Node, ...]) -> PlainPattern:
        if len(nodes) > MAX_LENGTH:
            raise GrammarError(_TOO_LARGE)
        parts = [self.plain(node) for node in nodes]
        pattern = between.join(part.pattern for part in parts)
        return PlainPattern(pattern, sum(part.length for part in parts), sum(part.weight for part in parts))


def _check_size(plain: PlainPattern, where: int) -> PlainPattern:
    if len(plain.pattern) > 10 * MAX_LENGTH or plain.length > MAX_LENGTH:
        raise GrammarError(_TOO_LARGE, where)
    return plain


def _to_lark(node: Node, rules: dict[str, Node]) -> str:
    match node:
        case CharClass():
            ranges = merge_ranges(list(node.ranges), node.negated)
            return f"/{write_class(ranges)}/"
        case RuleReference():
            return f"r{list(rules).index(node.name)}"
        case Sequence():
            return " ".join(_to_lark(part, rules) for part in node.parts) or '""'
        case Alternatives():
            return "(" + " | ".join(_to_lark(arm, rules) for arm in node.alternatives) + ")"
        case Repeat():
            high = "" if node.high is None else node.high
            return f"({_to_lark(node.part, rules)}){{{node.low},{high}}}"
