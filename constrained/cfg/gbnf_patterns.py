"""Writes GBNF rules without recursion as plain patterns (see regex/python_syntax.py)."""

from __future__ import annotations

from plait.constrained.cfg.gbnf_parser import Alternatives, CharClass, Node, Repeat, RuleReference, Sequence
from plait.constrained.regex.char_classes import merge_ranges, write_class
from plait.constrained.regex.python_syntax import PlainPattern
from plait.constrained.specs import GrammarError

MAX_LENGTH = 100_000
_TOO_LARGE = "the grammar is too large once it is written out"


class PatternWriter:
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
        raise AssertionError(node)  # a token, which has no pattern

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
