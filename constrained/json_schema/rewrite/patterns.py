"""Converts patterns of JSON Schema (ECMA 262, searched) to plain patterns that match the whole text.

A pattern is first translated to Python's syntax with ECMA's meaning, because Python's parser builds the tree.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from plait.constrained.regex.char_classes import merge_ranges, write_class
from plait.constrained.regex.lookaround_automaton import TOO_MANY_STATES, with_lookaround
from plait.constrained.regex.pattern_algebra import TOO_LARGE, for_interegular, intersect
from plait.constrained.regex.python_syntax import PlainPattern, PlainPatternWriter, parse_regex
from plait.constrained.regex.unicode_properties import property_ranges
from plait.constrained.specs import GrammarError

MAX_LENGTH = 100_000
MAX_ARMS = 64
MAX_IN_PARTS = 400  # characters of a pattern whose parts beside lookaround are combined, where all of it is too large
MAX_JOINED = 1_000  # characters of one pattern for what several could say
MAX_PAIRS = 100_000
MAX_WEIGHT_TO_MATCH = 2000
ANY = "[\\U00000000-\\U0010ffff]"
_SPACE = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_SPACES = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
_NO_SPACE = write_class(merge_ranges([*((ord(c), ord(c)) for c in _SPACES), (0x2000, 0x200A)], negated=True))[1:-1]
_NO_DIGIT, _NO_WORD = r"\x00-/:-\U0010ffff", r"\x00-/:-@\[-^`{-\U0010ffff"
_CLASS_ESCAPES = {"d": "0-9", "D": _NO_DIGIT, "w": "A-Za-z0-9_", "W": _NO_WORD, "s": _SPACE, "S": _NO_SPACE}
_IDENTITY_ESCAPES = frozenset(r"fnrtv\^$.*+?()[]{}|/-" + "\"'#%&,:;<=>@_`~! ")
_ESCAPE = re.compile(
    r"\\(?:u\{(?P<braced>[0-9a-fA-F]{1,6})\}|u(?P<four>[0-9a-fA-F]{4})|x(?P<two>[0-9a-fA-F]{2})"
    r"|[pP]\{(?P<property>[^}]{1,40})\}|c(?P<control>[A-Za-z])|(?P<nul>0)(?![0-9])|(?P<one>.))",
    re.DOTALL,
)
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_ASSERTION = re.compile(r"\(\?<?[=!]|\^|\\[ZbB]")
_PROPERTY = re.compile(r"\\[pP]\{")
_NARROWED = re.compile(r"\\[pPbB]")
_NEGATIVE = re.compile(r"\(\?<?!")
_GROUP = re.compile(r"\(\?(?P<name>P?<[A-Za-z_$][\w$]*>)?")


@lru_cache(maxsize=512)
def ecma_to_plain_pattern(pattern: str) -> PlainPattern:
    """Returns a plain pattern of all texts in which `pattern` is found. Raises GrammarError if that is unsupported.

    >>> ecma_to_plain_pattern("^ab?$").pattern
    'a(?:b){0,1}'
    """
    translated = _to_python_syntax(pattern)
    return _plain(_parsed(translated), translated)


@lru_cache(maxsize=512)
def ecma_to_plain_patterns(pattern: str) -> tuple[PlainPattern, ...]:
    """Returns plain patterns that a text matches all, exactly if `pattern` is found in it: one, unless that is large.

    Proof: a text matches ^(?=A)B exactly if it matches ^(?=A) and ^B.

    >>> [len(ecma_to_plain_patterns(pattern)) for pattern in ("^(?=a).b$", "^(?!.*ab).{1,99}$")]
    [1, 2]
    """
    translated = _to_python_syntax(pattern)
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


def _to_python_syntax(pattern: str) -> str:
    """Returns `pattern` in Python's syntax with ECMA 262's meaning."""
    out, at, in_class, negated = "", 0, False, False
    if _PROPERTY.search(pattern) and _NEGATIVE.search(pattern):
        raise GrammarError("a Unicode property beside negative lookaround is not supported")
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            text, at = _translate_escape(pattern, at, in_class, negated)
            out += text
            continue
        if in_class:
            in_class = char != "]"
            out += "\\" + char if char in "[&~|" else char
        elif char == "[":
            in_class, negated = True, pattern.startswith("[^", at)
            opened = next((o for o in ("[^]", "[]") if pattern.startswith(o, at)), "")
            if opened:
                out, at, in_class = out + (r"[\s\S]" if opened == "[^]" else r"[^\s\S]"), at + len(opened), False
                continue
            out += char
        elif char == "(" and (group := _GROUP.match(pattern, at)) is not None:
            out, at = _translate_group(out, pattern, group)
            continue
        elif char == "{" and not _COUNT.match(pattern, at):
            out += r"\{"
        elif char == "{" and pattern[_COUNT.match(pattern, at).end() :][:1] == "+":  # type: ignore[union-attr]
            raise GrammarError("the pattern is invalid: nothing to repeat")
        else:
            out += {".": r"[^\n\r\u2028\u2029]", "$": r"\Z"}.get(char, char)
        at += 1
    return out


def _translate_group(out: str, pattern: str, group: re.Match[str]) -> tuple[str, int]:
    if group["name"]:
        return f"{out}(?:", group.end()
    follows = pattern[group.end() : group.end() + 1]
    if follows not in (":", "=", "!", "<"):
        raise GrammarError("the pattern is invalid: an unknown group")
    return f"{out}(?", group.end()


def _translate_escape(pattern: str, at: int, in_class: bool, negated: bool) -> tuple[str, int]:
    """Returns (the escape at `at` in Python's syntax, the index after it)."""
    escape = _ESCAPE.match(pattern, at)
    if escape is None:
        raise GrammarError("the pattern is invalid: bad escape at its end")
    if escape["property"]:
        ranges = property_ranges(
            escape["property"], negated=pattern[at + 1] == "P", with_unassigned=in_class and negated
        )
        if ranges is None:
            raise GrammarError("the pattern uses a Unicode property other than a general category")
        return (write_class(ranges)[1:-1] if in_class else write_class(ranges)), escape.end()
    code = escape["braced"] or escape["four"] or escape["two"]
    if code is not None:
        high, end = int(code, 16), escape.end()
        low = _ESCAPE.match(pattern, end)
        if 0xD800 <= high < 0xDC00 and low and low["four"] and 0xDC00 <= int(low["four"], 16) < 0xE000:
            high, end = 0x10000 + ((high - 0xD800) << 10) + int(low["four"], 16) - 0xDC00, low.end()
        if high > 0x10FFFF:
            raise GrammarError("the pattern names a code point beyond U+10FFFF")
        return f"\\U{high:08x}", end
    if escape["control"]:
        return f"\\x{ord(escape['control']) % 32:02x}", escape.end()
    return _translate_single_escape(escape, in_class), escape.end()


def _translate_single_escape(found: re.Match[str], in_class: bool) -> str:
    one = found["one"] or found["nul"]
    if found["nul"]:
        return r"\x00"
    if one in _CLASS_ESCAPES:
        return _CLASS_ESCAPES[one] if in_class else f"[{_CLASS_ESCAPES[one]}]"
    if one == "b" and in_class:
        return r"\x08"
    if one in "pP":
        raise GrammarError("the pattern is invalid: a Unicode property without its name")
    if one in _IDENTITY_ESCAPES or not one.isascii():
        return "\\" + one if one in "fnrtv" or not one.isalnum() else one
    if one in "bB123456789":
        return "\\" + one
    raise GrammarError(f"the pattern is invalid: bad escape \\{one}")


def is_narrowed(pattern: str) -> bool:
    """Returns whether a pattern has Unicode properties or word boundaries: its complement is not known.

    It is made to match only what it matches in all dialects, and so might its complement match too much.
    """
    return _NARROWED.search(pattern) is not None


def matches(pattern: str, text: str) -> bool:
    """Returns whether `pattern` is found in `text`. Raises GrammarError if the pattern is invalid.

    >>> matches("b$", "ab")
    True
    """
    plain = ecma_to_plain_pattern(pattern)
    if plain.weight > MAX_WEIGHT_TO_MATCH:
        raise GrammarError("the pattern is too large to be matched")
    return re.fullmatch(plain.pattern, text) is not None


def are_disjoint(left: str, right: str, max_weight: float = 400.0) -> bool:
    """Returns whether no text matches both plain patterns.

    Returns False if that cannot be decided: for larger patterns, and for ones that interegular cannot read.

    >>> are_disjoint("ab", "a(?:c){1,2}")
    True
    """
    import interegular

    if len(left) + len(right) > 4 * max_weight:
        return False
    try:
        a, b = (interegular.parse_pattern(for_interegular(pattern)).to_fsm() for pattern in (left, right))
        if len(a.states) * len(b.states) > MAX_PAIRS:
            return False
        return bool((a & b).empty())  # its isdisjoint() returns True for patterns that share texts
    except (ValueError, RecursionError, OverflowError, interegular.Unsupported, interegular.InvalidSyntax):
        return False


def literal(text: str) -> str:
    """Returns a plain pattern of exactly this text.

    >>> literal("a.")
    'a\\\\U0000002e'
    """
    return "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text)


def complement_pattern(texts: list[str]) -> str:
    """Returns a plain pattern of every text but these, built from their prefix tree.

    A text differs from all of `texts` exactly if it ends at an inner node where none of them ends, or takes a
    character that no branch of its node has.

    >>> complement_pattern(["a"])
    '(?:(?:[^\\\\U00000061][\\\\U00000000-\\\\U0010ffff]*)?|a[\\\\U00000000-\\\\U0010ffff]+)'
    """
    return _leave_trie(sorted(set(texts)))


def _leave_trie(texts: list[str]) -> str:
    ends_here = texts[0] == ""
    rest = texts[1:] if ends_here else texts
    heads = sorted({text[0] for text in rest})
    if not heads:
        return f"{ANY}+"
    strays = "".join(f"\\U{ord(head):08x}" for head in heads)
    leaving = f"[^{strays}]{ANY}*"
    arms = [leaving if ends_here else f"(?:{leaving})?"]
    arms += [literal(head) + _leave_trie([text[1:] for text in rest if text[0] == head]) for head in heads]
    return f"(?:{'|'.join(arms)})"
