"""Compiles Ebnf: GBNF without recursion is one pattern, and with recursion a grammar over single characters.

Knows: the tree of rules. Must not know: the notation's syntax, or how grammars run. llguidance splits a text
into terminals greedily, which GBNF does not; terminals of one character each leave it nothing to split.
"""

from __future__ import annotations

import llguidance

from plait.constrained.char_classes import merged, written
from plait.constrained.gbnf import Alternatives, Chars, Node, Repeat, Rule, Sequence, parse
from plait.constrained.llg import LlgText, compiled
from plait.constrained.product import Table
from plait.constrained.regex import StatesOf, compile_plain
from plait.constrained.specs import Ebnf, GrammarError
from plait.constrained.syntax import Plain
from plait.constrained.vocabulary import Vocabulary

MAX_LENGTH = 100_000
_TOO_LARGE = "the grammar is too large once it is written out"


def compile_ebnf(spec: Ebnf, vocabulary: Vocabulary, states: StatesOf | None = None) -> Table | LlgText:
    """The grammar, as an automaton where it has no recursion; GrammarError with the index of what is wrong.

    `states` makes the automaton over bytes; see compile_plain.

    >>> compile_ebnf(Ebnf('root ::= "a"+'), vocabulary)                   # doctest: +SKIP
    """
    rules = parse(spec.grammar)
    if not _is_recursive(rules):
        return compile_plain(_Plainly(rules).plain(rules["root"]), vocabulary, states)
    lines = [f"r{at}: {_lark(node, rules)}" for at, node in enumerate(rules.values())]
    lines.insert(0, f"start: r{list(rules).index('root')}")
    return compiled(LlgText(llguidance.LLMatcher.grammar_from_lark("\n".join(lines))), vocabulary)


def _references(node: Node) -> list[Rule]:
    match node:
        case Rule():
            return [node]
        case Repeat():
            return _references(node.part)
        case Sequence():
            return [found for part in node.parts for found in _references(part)]
        case Alternatives():
            return [found for arm in node.arms for found in _references(arm)]
        case Chars():
            return []


def _is_recursive(rules: dict[str, Node]) -> bool:
    """Whether a rule that `root` leads to leads back to itself."""
    state: dict[str, bool] = {}  # False while a rule is being followed, True behind it
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


class _Plainly:
    """Writes nodes without recursion as plain patterns, each rule once."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._made: dict[str, Plain] = {}

    def plain(self, node: Node) -> Plain:
        """A node as a plain pattern; GrammarError where it is too large."""
        match node:
            case Chars():
                ranges = merged(list(node.ranges), node.negated)
                return Plain(written(ranges), 1, 1 + len(ranges) / 4)
            case Rule():
                if node.name not in self._made:
                    self._made[node.name] = _bounded(self.plain(self._rules[node.name]), node.where)
                return self._made[node.name]
            case Sequence():
                return self._together("", node.parts)
            case Alternatives():
                return self._together("|", node.arms).within("(?:", ")")
            case Repeat():
                high = "" if node.high is None else node.high
                times = node.low + 1 if node.high is None else node.high
                return self.plain(node.part).within("(?:", f"){{{node.low},{high}}}", times)

    def _together(self, between: str, nodes: tuple[Node, ...]) -> Plain:
        if len(nodes) > MAX_LENGTH:
            raise GrammarError(_TOO_LARGE)
        parts = [self.plain(node) for node in nodes]
        pattern = between.join(part.pattern for part in parts)
        return Plain(pattern, sum(part.length for part in parts), sum(part.weight for part in parts))


def _bounded(plain: Plain, where: int) -> Plain:
    if len(plain.pattern) > 10 * MAX_LENGTH or plain.length > MAX_LENGTH:
        raise GrammarError(_TOO_LARGE, where)
    return plain


def _lark(node: Node, rules: dict[str, Node]) -> str:
    match node:
        case Chars():
            found = merged(list(node.ranges), node.negated)
            return f"/{written(found)}/"
        case Rule():
            return f"r{list(rules).index(node.name)}"
        case Sequence():
            return " ".join(_lark(part, rules) for part in node.parts) or '""'
        case Alternatives():
            return "(" + " | ".join(_lark(arm, rules) for arm in node.arms) + ")"
        case Repeat():
            high = "" if node.high is None else node.high
            return f"({_lark(node.part, rules)}){{{node.low},{high}}}"
