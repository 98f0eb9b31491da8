"""Operations on patterns: search, complement, disjointness."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from typing import Any

import jsonschema_rs
import numpy as np
from numpy.typing import NDArray

from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.json_schema.rewrite.patterns.conversion import ANY, ecma_to_plain_pattern
from plait.constrained.regex.automaton_writer import NO_TEXT
from plait.constrained.regex.char_classes import escape_code_point, write_literal
from plait.constrained.regex.python_syntax import parse_regex
from plait.constrained.regex.small_dfa import build_small_dfa, reached_pairs
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.byte_trie import Int32Array

MAX_PAIRS = 20_000  # states of two automata that are reached by one text
MAX_AUTOMATON_WORK = 60_000  # see build_small_dfa: 60 ms
MAX_WEIGHT_TO_MATCH = 2000
_CODE_POINT = re.compile(r"\\U00([0-9a-f]{6})")
_NARROWED = re.compile(r"\\[pPbB]|\(\?i")


def is_narrowed(pattern: str) -> bool:
    """Returns whether a pattern has Unicode properties, word boundaries or ignores case.

    Its conversion matches only what it matches in every regex dialect, so the complement of the conversion may match
    too much.
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
    return matches_whole(f"^(?:{plain.pattern})$", text)


def matches_whole(anchored: str, text: str) -> bool:
    """Returns whether a plain pattern, which is anchored at both ends, matches a text.

    Texts that Rust's regex may not read, as those with a lone surrogate, are left to `re`.

    >>> matches_whole("^(?:a)$", "a"), matches_whole("^(?:a)$", "ab")
    (True, False)
    """
    validator = _validator(anchored)
    if validator is None or not text.isprintable():
        return re.fullmatch(anchored[1:-1], text) is not None
    return bool(validator.is_valid(text))


@lru_cache(maxsize=4096)
def _validator(anchored: str) -> jsonschema_rs.Draft202012Validator | None:
    """Returns a validator of a pattern, by Rust's regex; None if the pattern is larger than that takes.

    It compiles a pattern of wide classes of characters in a tenth of the time of `re`.
    """
    try:
        return jsonschema_rs.Draft202012Validator({"pattern": anchored}, pattern_options=jsonschema_rs.RegexOptions())
    except (jsonschema_rs.ValidationError, ValueError):
        return None


@lru_cache(maxsize=1024)
def are_disjoint(left: str, right: str) -> bool:
    """Returns whether no text matches both plain patterns; False if that would take too much work.

    >>> are_disjoint("ab", "a(?:c){1,2}")
    True
    """
    try:
        (rows, ends), (other_rows, other_ends) = _byte_automaton(left), _byte_automaton(right)
        reached = reached_pairs(rows, other_rows, MAX_PAIRS)
        return not (ends[0] and other_ends[0]) and not any(ends[one] and other_ends[other] for one, other in reached)
    except (DfaTooLarge, re.error, OverflowError):
        return False


@lru_cache(maxsize=256)
def _byte_automaton(plain: str) -> tuple[Int32Array, NDArray[np.bool_]]:
    states, _, accepting = build_small_dfa(plain, MAX_AUTOMATON_WORK)
    return states, accepting


def finite_texts(plain: str, limit: int = 24) -> list[str] | None:
    """Returns the texts that a plain pattern matches, if there are at most `limit`; else None.

    >>> finite_texts("a(?:b|c){0,1}"), finite_texts("a{0,}"), finite_texts(NO_TEXT)
    (['a', 'ab', 'ac'], None, [])
    """
    if plain == NO_TEXT:
        return []
    try:
        found = _texts_of(list(parse_regex(plain)), limit)
    except (re.error, RecursionError, OverflowError):
        return None
    return None if found is None else sorted(found)


def _texts_of(items: list[Any], limit: int) -> set[str] | None:
    found = {""}
    for op, value in items:
        texts = _texts_of_item(str(op), value, limit)
        if texts is None or len(found) * len(texts) > limit:
            return None
        found = {before + after for before in found for after in texts}
    return found


def _texts_of_item(op: str, value: Any, limit: int) -> set[str] | None:
    match op:
        case "LITERAL":
            return {chr(value)}
        case "IN" if str(value[0][0]) != "NEGATE":
            spans = [(content, content) if str(kind) == "LITERAL" else content for kind, content in value]
            if sum(high - low + 1 for low, high in spans) > limit:
                return None
            return {chr(code) for low, high in spans for code in range(low, high + 1)}
        case "SUBPATTERN":
            return _texts_of(list(value[3]), limit)
        case "BRANCH":
            arms = [_texts_of(list(arm), limit) for arm in value[1]]
            return None if None in arms else set[str]().union(*(arm for arm in arms if arm is not None))
        case "MAX_REPEAT" if isinstance(value[1], int) and value[1] <= limit:
            once = _texts_of(list(value[2]), limit)
            counts = range(value[0], value[1] + 1)
            return None if once is None or len(once) ** value[1] > limit else _repeated(once, counts)
    return None


def _repeated(texts: set[str], counts: range) -> set[str]:
    return {"".join(several) for count in counts for several in product(texts, repeat=count)}


def complement_pattern(texts: list[str]) -> str:
    """Returns a plain pattern of every text but `texts`.

    It follows their prefix tree (trie). A text differs from all of them if and only if it ends at a node where none of
    them ends, or continues with a character that its node has no branch for.

    >>> complement_pattern(["a"])
    '(?:(?:[^\\\\U00000061][\\\\U00000000-\\\\U0010ffff]*)?|a[\\\\U00000000-\\\\U0010ffff]+)'
    """
    return _complement_of_sorted(sorted(set(texts)))


def _complement_of_sorted(texts: list[str]) -> str:
    """`texts`: the suffixes below one node of the prefix tree, sorted and distinct."""
    ends_here = texts[0] == ""
    longer = texts[1:] if ends_here else texts
    first_chars = sorted({text[0] for text in longer})
    if not first_chars:
        return f"{ANY}+"
    escaped = "".join(escape_code_point(ord(char)) for char in first_chars)
    other_char = f"[^{escaped}]{ANY}*"
    arms = [other_char if ends_here else f"(?:{other_char})?"]
    for char in first_chars:
        arms.append(write_literal(char) + _complement_of_sorted([text[1:] for text in longer if text[0] == char]))
    return f"(?:{'|'.join(arms)})"


def to_ecma(plain: str) -> str:
    """Returns a plain pattern as one of JSON Schema that matches the whole text: `\\U00000061` is `\\u{000061}` there.

    >>> to_ecma(complement_pattern([]))
    '^(?:[\\\\u{000000}-\\\\u{10ffff}]+)$'
    """
    written = _CODE_POINT.sub(r"\\u{\1}", plain)
    return f"^(?:{written})$"
