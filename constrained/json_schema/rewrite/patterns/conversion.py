"""Converts patterns of JSON Schema (ECMA 262, searched) to plain patterns that match the whole text.

A pattern is first translated to Python's syntax with ECMA's meaning, because Python's parser builds the tree.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from plait.constrained.json_schema.rewrite.patterns.ecma_syntax import to_python_syntax
from plait.constrained.regex.lookaround_automaton import TOO_MANY_STATES, with_lookaround
from plait.constrained.regex.pattern_algebra import TOO_LARGE, intersect
from plait.constrained.regex.python_syntax import PlainPattern, PlainPatternWriter, parse_regex
from plait.constrained.specs import GrammarError

MAX_LENGTH = 100_000
MAX_ARMS = 64
MAX_IN_PARTS = 400  # characters of a pattern whose parts beside lookaround are combined, where all of it is too large
MAX_JOINED = 1_000  # characters of one pattern that replaces several
ANY = "[\\U00000000-\\U0010ffff]"
_ASSERTION = re.compile(r"\(\?<?[=!]|\^|\\[ZbB]")


@lru_cache(maxsize=512)
def ecma_to_plain_pattern(pattern: str) -> PlainPattern:
    """Returns a plain pattern of all texts in which `pattern` is found. Raises GrammarError if that is unsupported.

    >>> ecma_to_plain_pattern("^ab?$").pattern
    'a(?:b){0,1}'
    """
    translated = to_python_syntax(pattern)
    return _plain(_parsed(translated), translated)


@lru_cache(maxsize=512)
def ecma_to_plain_patterns(pattern: str) -> tuple[PlainPattern, ...]:
    """Returns plain patterns that a text matches all, exactly if `pattern` is found in it: one, unless that is large.

    Proof: a text matches ^(?=A)B exactly if it matches ^(?=A) and ^B.

    >>> [len(ecma_to_plain_patterns(pattern)) for pattern in ("^(?=a).b$", "^(?!.*ab).{1,99}$")]
    [1, 2]
    """
    translated = to_python_syntax(pattern)
    items = _without_groups(_parsed(translated))
    ahead = [str(op).startswith("ASSERT") and value[0] > 0 for op, value in items[1:]]
    num_ahead = [*ahead, False].index(False)
    is_split = bool(num_ahead) and _is_anchor(items[0], "AT_BEGINNING")
    try:
        plain = ecma_to_plain_pattern(pattern)
        if not is_split or len(plain.pattern) <= MAX_JOINED:
            return (plain,)
    except GrammarError as error:
        if error.reason not in (TOO_LARGE, TOO_MANY_STATES) or not is_split:
            raise
    parts = [[items[0], one] for one in items[1 : num_ahead + 1]]
    return tuple(_plain(part, translated) for part in [*parts, [items[0], *items[num_ahead + 1 :]]])


def _parsed(translated: str) -> list[Any]:
    try:
        return list(parse_regex(translated))
    except re.error as error:
        raise GrammarError(f"the pattern is invalid: {error.msg}") from None
    except (OverflowError, RecursionError):
        raise GrammarError("the pattern is too large or nested too deeply") from None


def _plain(items: list[Any], translated: str) -> PlainPattern:
    if _has_lookaround(items):
        try:
            return with_lookaround(items, translated)
        except GrammarError as error:
            if error.reason != TOO_LARGE or len(translated) > MAX_IN_PARTS:
                raise
    try:
        arms = [_unanchored(arm, translated) for arm in _alternatives(items)]
    except (OverflowError, RecursionError):
        raise GrammarError("the pattern is too large or nested too deeply") from None
    except GrammarError:
        if not _ASSERTION.search(translated):
            raise
        return with_lookaround(items, translated)
    plain = arms[0] if len(arms) == 1 else _any_of(arms)
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


def _any_of(arms: list[PlainPattern]) -> PlainPattern:
    pattern = "|".join(f"(?:{arm.pattern})" for arm in arms)
    return PlainPattern(f"(?:{pattern})", sum(arm.length for arm in arms), sum(arm.weight for arm in arms))


def _unanchored(items: list[Any], spelled: str) -> PlainPattern:
    """Returns one alternative as a pattern of the whole text: any text may surround it where it is not anchored."""
    starts = bool(items) and _is_anchor(items[0], "AT_BEGINNING")
    ends = bool(items) and _is_anchor(items[-1], "AT_END")
    items = _without_groups(items)
    if any(str(op).startswith("ASSERT") for op, _ in items):
        return _with_lookaround(items, spelled, starts, ends)
    inner = PlainPatternWriter(spelled).sequence(items, re.ASCII, True, True)
    before, after = "" if starts else f"{ANY}*", "" if ends else f"{ANY}*"
    return PlainPattern(f"{before}{inner.pattern}{after}", inner.length + 2, inner.weight + 2)


def _without_groups(items: list[Any]) -> list[Any]:
    """Returns `items` with those of plain groups that contain lookaround in place of the groups."""
    flat: list[Any] = []
    for op, value in items:
        if str(op) == "SUBPATTERN" and not value[1] and not value[2]:
            inner = _without_groups(list(value[3]))
            has_lookaround = any(str(inner_op).startswith("ASSERT") for inner_op, _ in inner)
            flat += inner if has_lookaround else [(op, value)]
        else:
            flat.append((op, value))
    return flat


def _with_lookaround(items: list[Any], spelled: str, starts: bool, ends: bool) -> PlainPattern:
    """Returns an alternative with lookaround between its parts, outside of groups, as a pattern of the whole text.

    Proof: a text matches P(?=A)Q exactly if it is a text of P before one of Q that begins with a text of A, and
    P(?<=B)Q if the text of P ends with one of B. P and Q reach to the ends of the text. Lookbehind after lookahead
    that is not at the start would have to see the part before it, and is refused.
    """
    parts = [item for item in items if str(item[0]) != "AT"]
    if len(items) - len(parts) != starts + ends:
        raise GrammarError("lookaround beside anchors in the middle of the pattern is not supported")
    before = PlainPattern("" if starts else f"{ANY}*", 1, 1)
    for at, (op, value) in enumerate(parts):
        if not str(op).startswith("ASSERT"):
            before = _concatenated(before, _written([parts[at]], spelled))
        elif value[0] < 0:
            behind = _concatenated(PlainPattern(f"{ANY}*", 1, 1), _written(list(value[1]), spelled))
            before = intersect(before.pattern, behind.pattern, negated=str(op) == "ASSERT_NOT")
        else:
            rest = parts[at + 1 :]
            is_start = starts and all(str(inner).startswith("ASSERT") for inner, _ in parts[:at])
            if not is_start and any(str(inner).startswith("ASSERT") and seen[0] < 0 for inner, seen in rest):
                raise GrammarError("lookbehind after lookahead is not supported")
            after = (
                _with_lookaround([("AT", "AT_BEGINNING"), *rest], spelled, True, False)
                if not ends
                else _ending(rest, spelled)
            )
            ahead = _looked_at(list(value[1]), spelled, is_start)
            after = intersect(after.pattern, ahead.pattern, negated=str(op) == "ASSERT_NOT")
            return _concatenated(before, after)
    return before if ends else _concatenated(before, PlainPattern(f"{ANY}*", 1, 1))


def _ending(rest: list[Any], spelled: str) -> PlainPattern:
    """Returns the parts behind a lookahead of a pattern that is anchored at its end."""
    return _with_lookaround([("AT", "AT_BEGINNING"), *rest, ("AT", "AT_END")], spelled, True, True)


def _looked_at(items: list[Any], spelled: str, is_start: bool) -> PlainPattern:
    """Returns the texts that begin with what a lookahead matches; `^` in it holds if the lookahead `is_start`."""
    arms = []
    for arm in _alternatives(items):
        starts = bool(arm) and _is_anchor(arm[0], "AT_BEGINNING")
        if starts and not is_start:
            raise GrammarError("^ in lookahead is supported at the start of the pattern only")
        ends = bool(arm) and _is_anchor(arm[-1], "AT_END")
        inner = _written(arm[starts : len(arm) - ends], spelled)
        arms.append(inner if ends else _concatenated(inner, PlainPattern(f"{ANY}*", 1, 1)))
    return arms[0] if len(arms) == 1 else _any_of(arms)


def _written(items: list[Any], spelled: str) -> PlainPattern:
    return PlainPatternWriter(spelled).sequence(items, re.ASCII, False, False)


def _concatenated(one: PlainPattern, other: PlainPattern) -> PlainPattern:
    pattern = "".join(f"(?:{part.pattern})" for part in (one, other) if part.pattern)
    return PlainPattern(pattern, one.length + other.length, one.weight + other.weight)


def _is_anchor(item: Any, kind: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]).startswith(kind)


def _alternatives(items: list[Any]) -> list[list[Any]]:
    """Expands `items` into alternatives whose anchors are at their ends, also those from groups at the ends."""
    for place in (0, -1) if items else ():
        op, value = str(items[place][0]), items[place][1]
        rest = (items[1:], None) if place == 0 else (None, items[:-1])
        if op == "SUBPATTERN" and not value[1] and not value[2] and _has_anchor(items[place]):
            return _alternatives(_joined(rest, list(value[3])))
        if op == "BRANCH" and _has_anchor(items[place]):
            expanded = [arm for inner in value[1] for arm in _alternatives(_joined(rest, list(inner)))]
            if len(expanded) > MAX_ARMS:
                raise GrammarError("the pattern has too many anchored alternatives")
            return expanded
    return [items]


def _joined(rest: tuple[list[Any] | None, list[Any] | None], inner: list[Any]) -> list[Any]:
    after, before = rest
    return [*(before or []), *inner, *(after or [])]


def _has_anchor(item: Any) -> bool:
    op, value = str(item[0]), item[1]
    if op == "SUBPATTERN":
        return any(_has_anchor(inner) for inner in value[3])
    if op == "BRANCH":
        return any(_has_anchor(inner) for arm in value[1] for inner in arm)
    return op == "AT" or op.startswith("ASSERT")
