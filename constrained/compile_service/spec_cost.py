"""Estimates what a spec costs to compile from its text alone, so that small ones need not wait for large ones."""

from __future__ import annotations

import re

from plait.constrained.specs import (
    Choices,
    Ebnf,
    JsonObject,
    JsonSchema,
    JsonString,
    Lark,
    Reasoning,
    Regex,
    Spec,
    Structural,
)

SMALL_COST = 8192
_COUNTED_REPEAT = re.compile(r"(\)?)\{(\d{1,9})(?:,(\d{0,9}))?\}")
_WIDE_REPEAT = re.compile(r"(?:(?<!\\)\.|\\[DSWw]|\[\^[^\]]*\]|\))(?:[*+]|\{\d*,\})")  # `.*`, `\w+`, `[^a]*`, `(..)+`
_COSTLY_KEYWORD = re.compile(
    r'"(?:oneOf|not|if|contains|uniqueItems|dependent\w+|dependencies|unevaluated\w+|patternProperties|propertyNames'
    r'|minProperties|maxProperties|multipleOf|pattern)"\s*:'
)
_KEYWORD_COST = 200  # characters that cost as much as a keyword that needs a proof
_DETERMINIZED_FROM = 8  # an automaton of `.*a.{n}` has 2**n states


def spec_cost(spec: Spec) -> int:
    """Returns the estimated cost in characters of plain schema: about 1 us of compile time each.

    The estimate may be far too low, since the cost of a pattern or of a proof is not visible in its text. A caller that
    depends on it needs a time limit.

    >>> spec_cost(Regex("[a-z]{5,30}")) < SMALL_COST < spec_cost(Regex("(a{1,1000}){1,1000}"))
    True
    """
    if isinstance(spec, Reasoning):
        return spec_cost(spec.then)
    if isinstance(spec, Regex):
        return _pattern_cost(spec.pattern)
    if isinstance(spec, Choices):
        return 8 * sum(map(len, spec.choices))
    if isinstance(spec, JsonSchema):
        return _schema_cost(spec.text) + len(str(spec.schemas))
    if isinstance(spec, JsonObject):
        return 0
    if isinstance(spec, Lark | Ebnf):
        return 4 * _pattern_cost(spec.grammar)
    return _structural_cost(spec)


def is_small(spec: Spec) -> bool:
    """Returns whether the spec probably compiles within some milliseconds.

    >>> is_small(JsonSchema({"type": "integer"}))
    True
    """
    return spec_cost(spec) <= SMALL_COST


def _structural_cost(spec: Structural) -> int:
    cost = spec_cost(spec.otherwise) if spec.otherwise is not None else 0
    for call in spec.calls:
        if call.schema is not None:
            cost += _schema_cost(call.schema)
        elif isinstance(call.content, JsonString):
            cost += 8 * spec_cost(call.content.of)
        elif isinstance(call.content, Regex | Lark):
            cost += spec_cost(call.content)
    return cost


def _schema_cost(text: str) -> int:
    if len(text) > SMALL_COST:
        return len(text)
    return _pattern_cost(text) + _KEYWORD_COST * len(_COSTLY_KEYWORD.findall(text))


def _pattern_cost(text: str) -> int:
    """Returns the length of a text, plus what its counted repeats add. Repeats of groups multiply, as if nested."""
    cost = len(text)
    if cost > SMALL_COST:
        return cost
    repeats = [(bool(group), int(upper or lower)) for group, lower, upper in _COUNTED_REPEAT.findall(text)]
    for is_of_group, count in repeats:
        cost = min(cost * max(1, count) if is_of_group else cost + count, 1 << 40)
    if max((count for _, count in repeats), default=0) >= _DETERMINIZED_FROM and _WIDE_REPEAT.search(text):
        cost += SMALL_COST
    return cost
