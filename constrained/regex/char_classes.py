"""Character classes of Python's `re` as ranges of code points, computed by `re` itself.

Rust's regex engines give `\\w`, `\\s` and `(?i)` other meanings; a class written as ranges means the same to all
engines.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending, disjoint, inclusive ranges of code points; no surrogates, and nothing above MAX_CHARACTER."""

MAX_CHARACTER = (
    0x10FFFE  # U+10FFFF, which marks the end of the text in compiler.py, is in the classes that have this one
)
_SURROGATES = (0xD800, 0xDFFF)


def merge_ranges(ranges: list[tuple[int, int]], negated: bool) -> Ranges:
    """Returns the union of `ranges`, or its complement, in normal form.

    >>> merge_ranges([(98, 99), (97, 97), (0xD800, 0xE000)], negated=False)
    ((97, 99), (57344, 57344))
    """
    joined: list[list[int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], high)
        else:
            joined.append([low, high])
    if negated:
        edges = [-1, *(edge for low, high in joined for edge in (low, high)), 0x110000]
        joined = [[edges[i] + 1, edges[i + 1] - 1] for i in range(0, len(edges), 2)]
    cut = _SURROGATES
    pieces = [(low, min(high, cut[0] - 1)) for low, high in joined]
    pieces += [(max(low, cut[1] + 1), min(high, MAX_CHARACTER)) for low, high in joined]
    return tuple(sorted((low, high) for low, high in pieces if low <= high))


@lru_cache(maxsize=256)
def class_ranges(class_pattern: str, flags: int) -> Ranges:
    """Returns what the one-character pattern `class_pattern` matches under `flags`; tens of ms the first time.

    >>> class_ranges("[k]", re.IGNORECASE) == merge_ranges([(75, 75), (107, 107), (0x212A, 0x212A)], negated=False)
    True
    """
    runs = re.compile(f"(?:{class_pattern})+", flags).finditer(_every_character())
    return merge_ranges([(run.start(), run.end() - 1) for run in runs], negated=False)


def named_ranges(name: str, flags: int) -> Ranges:
    """Returns the characters of `\\d`, `\\s` or `\\w`, or of a complement: `\\D`, `\\S`, `\\W`.

    >>> named_ranges(r"\\d", re.ASCII), named_ranges(r"\\D", re.ASCII)[0]
    (((48, 57),), (0, 47))
    """
    ranges = class_ranges(name.lower(), flags)
    return ranges if name.islower() else merge_ranges(list(ranges), negated=True)


@cache
def warm_up_classes() -> None:
    """Computes `\\d` and `\\s`, which takes 30 ms the first time."""
    for name in (r"\d", r"\s"):
        named_ranges(name, int(re.UNICODE))


def are_classes_warm() -> bool:
    """Returns whether `warm_up_classes` has been called."""
    return warm_up_classes.cache_info().currsize > 0


def write_class(ranges: Ranges) -> str:
    """Returns a class of exactly these characters, in a form that Python and Rust read alike.

    A range up to MAX_CHARACTER has U+10FFFF too: without it a pattern and its complement would not be all texts.

    >>> write_class(((97, 122), (46, 46)))
    '[\\\\U00000061-\\\\U0000007a\\\\U0000002e]'
    """
    if not ranges:
        return r"[^\U00000000-\U0010ffff]"
    last = MAX_CHARACTER
    spans = [
        escape_code_point(a) if a == b else f"{escape_code_point(a)}-{escape_code_point(b + (b == last))}"
        for a, b in ranges
    ]
    return f"[{''.join(spans)}]"


def escape_code_point(code: int) -> str:
    """Returns a code point as `\\UXXXXXXXX`."""
    return f"\\U{code:08x}"


def write_literal(text: str) -> str:
    """Returns a plain pattern of exactly this text.

    >>> write_literal("a.")
    'a\\\\U0000002e'
    """
    return "".join(c if c.isascii() and c.isalnum() else escape_code_point(ord(c)) for c in text)


def _every_character() -> str:
    """All code points in order, 4.4 MB. Decoding them takes 3 ms, joining characters 150."""
    return np.arange(0x110000, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
