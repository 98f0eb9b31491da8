"""Translates the syntax of ECMA 262's patterns to Python's, with ECMA's meaning."""

from __future__ import annotations

import re

from plait.constrained.regex.char_classes import merge_ranges, write_class
from plait.constrained.regex.unicode_properties import property_ranges
from plait.constrained.specs import GrammarError

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
_PROPERTY = re.compile(r"\\[pP]\{")
_IGNORE_CASE = "(?i)"
_FOLDED_ESCAPE = re.compile(r"\\(?:[uxpPc])")
_NEGATIVE = re.compile(r"\(\?<?!")
_GROUP = re.compile(r"\(\?(?P<name>P?<[A-Za-z_$][\w$]*>)?")


def to_python_syntax(pattern: str) -> str:
    """Returns `pattern` in Python's syntax with ECMA 262's meaning. Raises GrammarError if that is impossible."""
    out, in_class, negated = "", False, False
    folds, at = ([True], len(_IGNORE_CASE)) if pattern.startswith(_IGNORE_CASE) else ([False], 0)  # by open group
    if _NEGATIVE.search(pattern) and (_PROPERTY.search(pattern) or "(?i" in pattern):
        what = "a Unicode property" if _PROPERTY.search(pattern) else "(?i)"
        raise GrammarError(f"{what} beside negative lookaround is not supported")
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            if folds[-1] and _FOLDED_ESCAPE.match(pattern, at):
                raise GrammarError("an escaped letter beside (?i) is not supported")
            text, at = _translate_escape(pattern, at, in_class, negated)
            out += text
            continue
        if folds[-1] and (char.isalpha() or not char.isascii()):
            text, at = _both_cases(pattern, at, in_class)
            out += text
            continue
        if in_class:
            in_class = char != "]"
            out += "\\" + char if char in "[&~|" else char
        elif char == "[":
            in_class, negated = True, pattern.startswith("[^", at)
            if negated and folds[-1]:
                raise GrammarError("a negated class beside (?i) is not supported")
            opened = next((o for o in ("[^]", "[]") if pattern.startswith(o, at)), "")
            if opened:
                out, at, in_class = out + (r"[\s\S]" if opened == "[^]" else r"[^\s\S]"), at + len(opened), False
                continue
            out += char
        elif char == "(" and (group := _GROUP.match(pattern, at)) is not None:
            is_folding = pattern.startswith("(?i:", at)
            folds.append(folds[-1] or is_folding)
            out, at = (f"{out}(?:", at + 4) if is_folding else _translate_group(out, pattern, group)
            continue
        elif char == "{" and not _COUNT.match(pattern, at):
            out += r"\{"
        elif char == "{" and pattern[_COUNT.match(pattern, at).end() :][:1] == "+":  # type: ignore[union-attr]
            raise GrammarError("the pattern is invalid: nothing to repeat")
        else:
            if char in "()":
                folds = [*folds, folds[-1]] if char == "(" else folds[: max(1, len(folds) - 1)]
            out += {".": r"[^\n\r\u2028\u2029]", "$": r"\Z"}.get(char, char)
        at += 1
    return out


def _both_cases(pattern: str, at: int, in_class: bool) -> tuple[str, int]:
    """Returns (the letter or the range of letters at `at` in both cases, the index after it).

    Beyond ASCII the dialects differ on which characters are equal but for case.
    """
    if not pattern[at].isascii():
        raise GrammarError("a character beyond ASCII beside (?i) is not supported")
    if in_class and pattern[at - 1] == "-" and pattern[at - 2] != "[":
        raise GrammarError("a range of letters and others beside (?i) is not supported")
    low = high = pattern[at]
    if in_class and pattern[at + 1 : at + 2] == "-" and pattern[at + 2 : at + 3] not in ("", "]"):
        high = pattern[at + 2]
        if not (high.isascii() and high.isalpha() and high.isupper() == low.isupper() and low <= high):
            raise GrammarError("a range of letters and others beside (?i) is not supported")
        return f"{low}-{high}{low.swapcase()}-{high.swapcase()}", at + 3
    return (f"{low}{low.swapcase()}" if in_class else f"[{low}{low.swapcase()}]"), at + 1


def _translate_group(out: str, pattern: str, group: re.Match[str]) -> tuple[str, int]:
    if group["name"]:
        return f"{out}(?:", group.end()
    follows = pattern[group.end() : group.end() + 1]
    if follows not in (":", "=", "!", "<"):
        if follows and follows in "aimsuxL-":
            raise GrammarError("of flags, (?i) at the start of the pattern and (?i:...) are supported")
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
