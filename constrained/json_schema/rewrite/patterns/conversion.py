"""Converts patterns of JSON Schema (ECMA 262, searched) to plain patterns that match the whole text.

A pattern is first translated to Python's syntax, with ECMA's meaning, and parsed by Python's parser. `source` is always
the translated pattern, and `items` are nodes of its parse tree.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from plait.constrained.json_schema.rewrite.patterns.ecma_syntax import to_python_syntax
from plait.constrained.regex.automaton_writer import TOO_LARGE
from plait.constrained.regex.lookaround_automaton import TOO_MANY_STATES, with_lookaround
from plait.constrained.regex.pattern_algebra import intersect
from plait.constrained.regex.python_syntax import PlainPattern, PlainPatternWriter, parse_regex
from plait.constrained.specs import GrammarError

MAX_LENGTH = 100_000  # characters of a plain pattern, with repeats written out
MAX_ALTERNATIVES = 64
MAX_TO_INTERSECT = 400  # characters of a pattern with lookaround that is converted by intersection: this is slow
MAX_SEPARATED = 16  # alternatives of a negative lookahead that become patterns of their own
MAX_SINGLE = 1_000  # characters of a plain pattern above which several simpler ones replace it
ANY = "[\\U00000000-\\U0010ffff]"
_ANY_TEXT = PlainPattern(f"{ANY}*", 1, 1)
_ASSERTION = re.compile(r"\(\?<?[=!]|\^|\\[ZbB]")


def ecma_to_plain_pattern(pattern: str) -> PlainPattern:
    """Returns a plain pattern of all texts in which `pattern` is found. Raises GrammarError if that is unsupported.

    >>> ecma_to_plain_pattern("^ab?$").pattern
    'a(?:b){0,1}'
    """
    found = _converted(pattern)
    if isinstance(found, GrammarError):
        raise GrammarError(found.reason, found.where)
    return found


@lru_cache(maxsize=512)
def _converted(pattern: str) -> PlainPattern | GrammarError:
    """Returns what `ecma_to_plain_pattern` does, or its error, which may take as long to find."""
    try:
        source, items = _parsed(pattern)
        return _plain(list(items), source)
    except GrammarError as error:
        return GrammarError(error.reason, error.where)  # without the frames of the one that was raised


@lru_cache(maxsize=512)
def ecma_to_plain_patterns(pattern: str) -> tuple[PlainPattern, ...]:
    """Returns plain patterns all of which match a text if and only if `pattern` is found in it.

    There is one of them, unless it would be large and `pattern` begins with lookahead: a text matches ^(?=A)B if and
    only if it matches ^(?=A) and ^B, and it matches ^(?!A|B) if and only if it matches ^(?!A) and ^(?!B).

    >>> [len(ecma_to_plain_patterns(pattern)) for pattern in ("^(?=a).b$", "^(?!.*(ab|ba)).{1,99}$")]
    [1, 3]
    """
    source, parsed = _parsed(pattern)
    items = _inline_lookaround_groups(list(parsed))
    is_lookahead = [str(op).startswith("ASSERT") and value[0] > 0 for op, value in items[1:]]
    num_lookaheads = [*is_lookahead, False].index(False)
    if not num_lookaheads or not _is_anchor(items[0], "AT_BEGINNING"):
        return (ecma_to_plain_pattern(pattern),)
    try:
        plain = with_lookaround(items, source)
        if len(plain.pattern) <= MAX_SINGLE:
            return (plain,)
    except GrammarError as error:
        if error.reason not in (TOO_LARGE, TOO_MANY_STATES):
            raise
    anchor, rest = items[0], items[num_lookaheads + 1 :]
    lookaheads = [part for one in items[1 : num_lookaheads + 1] for part in _separated(one)]
    return tuple(_plain(part, source) for part in [*([anchor, one] for one in lookaheads), [anchor, *rest]])


def _separated(lookahead: Any) -> list[Any]:
    """Returns a lookahead, or one for each alternative of a negative one: all of them must hold."""
    op, (direction, items) = str(lookahead[0]), lookahead[1]
    arms = _branches(list(items)) if op == "ASSERT_NOT" else []
    return [(lookahead[0], (direction, arm)) for arm in arms] if 1 < len(arms) <= MAX_SEPARATED else [lookahead]


def _branches(items: list[Any]) -> list[list[Any]]:
    """Returns the alternatives of `items`, those of a group without flags within them written out."""
    for at, (op, value) in enumerate(items):
        before, after = items[:at], items[at + 1 :]
        if str(op) == "SUBPATTERN" and not value[1] and not value[2]:
            inner = _branches(list(value[3]))
            if len(inner) > 1:
                return [arm for one in inner for arm in _branches([*before, *one, *after])][: MAX_SEPARATED + 1]
        if str(op) == "BRANCH":
            arms = ([*before, *one, *after] for one in value[1])
            return [arm for one in arms for arm in _branches(one)][: MAX_SEPARATED + 1]
    return [items]


@lru_cache(maxsize=64)
def _parsed(pattern: str) -> tuple[str, tuple[Any, ...]]:
    """Returns a pattern in Python's syntax, and its parse tree, which nothing changes."""
    source = to_python_syntax(pattern)
    try:
        return source, tuple(parse_regex(source))
    except re.error as error:
        raise GrammarError(f"the pattern is invalid: {error.msg}") from None
    except (OverflowError, RecursionError):
        raise GrammarError("the pattern is too large or nested too deeply") from None


def _plain(items: list[Any], source: str) -> PlainPattern:
    if _has_lookaround(items):
        try:
            return with_lookaround(items, source)
        except GrammarError as error:
            if error.reason != TOO_LARGE or len(source) > MAX_TO_INTERSECT:
                raise
    try:
        arms = [_plain_alternative(arm, source) for arm in _alternatives(items)]
    except (OverflowError, RecursionError):
        raise GrammarError("the pattern is too large or nested too deeply") from None
    except GrammarError:
        if not _ASSERTION.search(source):
            raise
        return with_lookaround(items, source)
    plain = _union(arms)
    if plain.length > MAX_LENGTH:
        raise GrammarError("the pattern is too large once its repeats are written out")
    return plain


def _has_lookaround(items: list[Any]) -> bool:
    return any(
        op.startswith("ASSERT")
        or (op == "SUBPATTERN" and _has_lookaround(list(value[3])))
        or (op == "BRANCH" and any(_has_lookaround(list(arm)) for arm in value[1]))
        or (op in ("MAX_REPEAT", "MIN_REPEAT") and _has_lookaround(list(value[2])))
        for op, value in ((str(op), value) for op, value in items)
    )


def _union(arms: list[PlainPattern]) -> PlainPattern:
    if len(arms) == 1:
        return arms[0]
    pattern = "|".join(f"(?:{arm.pattern})" for arm in arms)
    return PlainPattern(f"(?:{pattern})", sum(arm.length for arm in arms), sum(arm.weight for arm in arms))


def _plain_alternative(items: list[Any], source: str) -> PlainPattern:
    """Returns one alternative as a pattern of the whole text: any text may surround it where it is not anchored."""
    has_start = bool(items) and _is_anchor(items[0], "AT_BEGINNING")
    has_end = bool(items) and _is_anchor(items[-1], "AT_END")
    items = _inline_lookaround_groups(items)
    if any(str(op).startswith("ASSERT") for op, _ in items):
        return _intersected(items, source, has_start, has_end)
    inner = PlainPatternWriter(source).sequence(items, re.ASCII, True, True)
    before, after = "" if has_start else f"{ANY}*", "" if has_end else f"{ANY}*"
    return PlainPattern(f"{before}{inner.pattern}{after}", inner.length + 2, inner.weight + 2)


def _inline_lookaround_groups(items: list[Any]) -> list[Any]:
    """Replaces each group without flags that contains lookaround by its contents."""
    flat: list[Any] = []
    for op, value in items:
        if str(op) == "SUBPATTERN" and not value[1] and not value[2]:
            inner = _inline_lookaround_groups(list(value[3]))
            has_lookaround = any(str(inner_op).startswith("ASSERT") for inner_op, _ in inner)
            flat += inner if has_lookaround else [(op, value)]
        else:
            flat.append((op, value))
    return flat


def _intersected(items: list[Any], source: str, has_start: bool, has_end: bool) -> PlainPattern:
    """Converts an alternative that has lookaround outside of groups, by intersection of the parts beside it.

    A text matches P(?=A)Q, where P and Q reach to the ends of the text, if and only if it is a text of P followed by
    one of Q that begins with a text of A. It matches P(?<=B)Q if and only if that text of P ends with a text of B.
    Lookbehind after lookahead could reach into P, so it is refused unless P is empty. `has_start` and `has_end` say
    whether `items` begin and end with an anchor.
    """
    parts = [item for item in items if str(item[0]) != "AT"]
    if len(items) - len(parts) != has_start + has_end:
        raise GrammarError("lookaround beside anchors in the middle of the pattern is not supported")
    before = PlainPattern("" if has_start else f"{ANY}*", 1, 1)
    for index, (op, value) in enumerate(parts):
        is_negated = str(op) == "ASSERT_NOT"
        if not str(op).startswith("ASSERT"):
            before = _concatenate(before, _plain_sequence([parts[index]], source))
        elif value[0] < 0:
            lookbehind = _concatenate(_ANY_TEXT, _plain_sequence(list(value[1]), source))
            before = intersect(before.pattern, lookbehind.pattern, negated=is_negated)
        else:
            rest = parts[index + 1 :]
            is_first = has_start and all(str(earlier).startswith("ASSERT") for earlier, _ in parts[:index])
            if not is_first and any(str(later).startswith("ASSERT") and args[0] < 0 for later, args in rest):
                raise GrammarError("lookbehind after lookahead is not supported")
            anchored = [("AT", "AT_BEGINNING"), *rest, *([("AT", "AT_END")] if has_end else [])]
            after = _intersected(anchored, source, True, has_end)
            lookahead = _lookahead_pattern(list(value[1]), source, is_first)
            return _concatenate(before, intersect(after.pattern, lookahead.pattern, negated=is_negated))
    return before if has_end else _concatenate(before, _ANY_TEXT)


def _lookahead_pattern(items: list[Any], source: str, is_first: bool) -> PlainPattern:
    """Returns a pattern of all texts that begin with what a lookahead matches.

    `is_first` says whether the lookahead is at the start of the text, where `^` in it matches.
    """
    arms = []
    for arm in _alternatives(items):
        has_start = bool(arm) and _is_anchor(arm[0], "AT_BEGINNING")
        if has_start and not is_first:
            raise GrammarError("^ in lookahead is supported at the start of the pattern only")
        has_end = bool(arm) and _is_anchor(arm[-1], "AT_END")
        inner = _plain_sequence(arm[has_start : len(arm) - has_end], source)
        arms.append(inner if has_end else _concatenate(inner, _ANY_TEXT))
    return _union(arms)


def _plain_sequence(items: list[Any], source: str) -> PlainPattern:
    return PlainPatternWriter(source).sequence(items, re.ASCII, False, False)


def _concatenate(one: PlainPattern, other: PlainPattern) -> PlainPattern:
    pattern = "".join(f"(?:{part.pattern})" for part in (one, other) if part.pattern)
    return PlainPattern(pattern, one.length + other.length, one.weight + other.weight)


def _is_anchor(item: Any, kind: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]).startswith(kind)


def _alternatives(items: list[Any]) -> list[list[Any]]:
    """Expands a group with anchors at either end of `items`, so that each alternative has its anchors at its ends."""
    for index in (0, len(items) - 1) if items else ():
        before, item, after = items[:index], items[index], items[index + 1 :]
        op, value = str(item[0]), item[1]
        if op == "SUBPATTERN" and not value[1] and not value[2] and _has_anchor(item):
            return _alternatives([*before, *value[3], *after])
        if op == "BRANCH" and _has_anchor(item):
            expanded = [arm for inner in value[1] for arm in _alternatives([*before, *inner, *after])]
            if len(expanded) > MAX_ALTERNATIVES:
                raise GrammarError("the pattern has too many anchored alternatives")
            return expanded
    return [items]


def _has_anchor(item: Any) -> bool:
    op, value = str(item[0]), item[1]
    if op == "SUBPATTERN":
        return any(_has_anchor(inner) for inner in value[3])
    if op == "BRANCH":
        return any(_has_anchor(inner) for arm in value[1] for inner in arm)
    return op == "AT" or op.startswith("ASSERT")
