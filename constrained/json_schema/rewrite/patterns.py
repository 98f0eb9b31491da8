"""Converts patterns of JSON Schema (ECMA 262, searched) to plain patterns that match the whole text.

A pattern is first translated to Python's syntax with ECMA's meaning, because Python's parser builds the tree.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from plait.constrained.regex.char_classes import merge_ranges, write_class
from plait.constrained.regex.python_syntax import PlainPattern, PlainPatternWriter, parse_regex
from plait.constrained.specs import GrammarError

MAX_LENGTH = 100_000
MAX_ARMS = 64
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
    r"|c(?P<control>[A-Za-z])|(?P<nul>0)(?![0-9])|(?P<one>.))",
    re.DOTALL,
)
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\(\?(?P<name><[A-Za-z_$][\w$]*>)?")


@lru_cache(maxsize=512)
def ecma_to_plain_pattern(pattern: str) -> PlainPattern:
    """Returns a plain pattern of all texts in which `pattern` is found. Raises GrammarError if that is unsupported.

    >>> ecma_to_plain_pattern("^ab?$").pattern
    'a(?:b){0,1}'
    """
    translated = _to_python_syntax(pattern)
    try:
        arms = [_unanchored(items, translated) for items in _alternatives(list(parse_regex(translated)))]
    except re.error as error:
        raise GrammarError(f"the pattern is invalid: {error.msg}") from None
    except (OverflowError, RecursionError):
        raise GrammarError("the pattern is too large or nested too deeply") from None
    plain = arms[0] if len(arms) == 1 else _any_of(arms)
    if plain.length > MAX_LENGTH:
        raise GrammarError("the pattern is too large once its repeats are written out")
    return plain


def _any_of(arms: list[PlainPattern]) -> PlainPattern:
    pattern = "|".join(f"(?:{arm.pattern})" for arm in arms)
    return PlainPattern(f"(?:{pattern})", sum(arm.length for arm in arms), sum(arm.weight for arm in arms))


def _unanchored(items: list[Any], spelled: str) -> PlainPattern:
    """Returns one alternative as a pattern of the whole text: any text may surround it where it is not anchored."""
    starts = bool(items) and _is_anchor(items[0], "AT_BEGINNING")
    ends = bool(items) and _is_anchor(items[-1], "AT_END")
    inner = PlainPatternWriter(spelled).sequence(items, re.ASCII, True, True)
    before, after = "" if starts else f"{ANY}*", "" if ends else f"{ANY}*"
    return PlainPattern(f"{before}{inner.pattern}{after}", inner.length + 2, inner.weight + 2)


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
    return op == "AT"


def _to_python_syntax(pattern: str) -> str:
    """Returns `pattern` in Python's syntax with ECMA 262's meaning."""
    out, at, in_class = "", 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            text, at = _translate_escape(pattern, at, in_class)
            out += text
            continue
        if in_class:
            in_class = char != "]"
            out += "\\" + char if char in "[&~|" else char
        elif char == "[":
            in_class, opened = True, next((o for o in ("[^]", "[]") if pattern.startswith(o, at)), "")
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


def _translate_escape(pattern: str, at: int, in_class: bool) -> tuple[str, int]:
    """Returns (the escape at `at` in Python's syntax, the index after it)."""
    escape = _ESCAPE.match(pattern, at)
    if escape is None:
        raise GrammarError("the pattern is invalid: bad escape at its end")
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
        raise GrammarError("the pattern uses a Unicode property, which is not supported")
    if one in _IDENTITY_ESCAPES or not one.isascii():
        return "\\" + one if one in "fnrtv" or not one.isalnum() else one
    if one in "bB123456789":
        return "\\" + one
    raise GrammarError(f"the pattern is invalid: bad escape \\{one}")


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
        a, b = (interegular.parse_pattern(_for_interegular(pattern)).to_fsm() for pattern in (left, right))
        if len(a.states) * len(b.states) > MAX_PAIRS:
            return False
        return bool((a & b).empty())  # its isdisjoint() returns True for patterns that share texts
    except (ValueError, RecursionError, OverflowError, interegular.Unsupported, interegular.InvalidSyntax):
        return False


_CLASS = re.compile(r"\[(\^?)((?:\\U[0-9a-f]{8}(?:-\\U[0-9a-f]{8})?)+)\]|\\U([0-9a-f]{8})")
_RANGE = re.compile(r"\\U([0-9a-f]{8})(?:-\\U([0-9a-f]{8}))?")


def _for_interegular(plain: str) -> str:
    """Returns a plain pattern for interegular, which expands ranges: large classes are written as complements."""

    def rewrite_class(found: re.Match[str]) -> str:
        if found[3]:
            return re.escape(chr(int(found[3], 16)))
        spans = [(int(a, 16), int(b or a, 16)) for a, b in _RANGE.findall(found[2])]
        ranges = merge_ranges(spans, bool(found[1]))
        gaps = merge_ranges(spans, not found[1])
        if sum(high - low for low, high in ranges) < 2000:
            return _listed("[", ranges) if ranges else r"[^\s\S]"
        return _listed("[^", gaps) if gaps else r"(?:.|\n)"

    return _CLASS.sub(rewrite_class, plain)


def _listed(opened: str, ranges: tuple[tuple[int, int], ...]) -> str:
    def char(code: int) -> str:
        return "\\" + chr(code) if chr(code) in r"\]^-[" else chr(code)

    return opened + "".join(char(a) if a == b else f"{char(a)}-{char(b)}" for a, b in ranges) + "]"


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
