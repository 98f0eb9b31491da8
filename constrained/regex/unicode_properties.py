"""The characters of the general categories of Unicode, for `\\p{..}` in patterns.

A newer version of Unicode than Python's may give a category to characters that have none here. So neither `\\p` nor its
complement has them.
"""

from __future__ import annotations

import sys
import unicodedata
from functools import cache, lru_cache

from plait.constrained.regex.char_classes import Ranges, merge_ranges

UNASSIGNED = "Cn"
_LONG_NAMES = {
    "Letter": "L", "Cased_Letter": "LC", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "Letter_Number": "Nl", "Other_Number": "No",
    "Punctuation": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf", "Other_Punctuation": "Po",
    "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk", "Other_Symbol": "So",
    "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl", "Paragraph_Separator": "Zp",
    "Control": "Cc", "Format": "Cf",
}  # fmt: skip
_PREFIXES = ("General_Category=", "gc=")


@lru_cache(maxsize=128)
def property_ranges(name: str, *, negated: bool = False, with_unassigned: bool = False) -> Ranges | None:
    """Returns the characters of a category, by its short or long name, or of all others; None if it is not known.

    >>> property_ranges("Zl"), property_ranges("Greek")
    (((8232, 8232),), None)
    """
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    short = _LONG_NAMES.get(name, name)
    wanted = {"Lu", "Ll", "Lt"} if short == "LC" else {one for one in _categories() if one.startswith(short)}
    if short not in _LONG_NAMES.values() or not wanted:
        return None
    found = _categories().keys() - wanted - {UNASSIGNED} if negated else wanted
    spans = [span for one in found | ({UNASSIGNED} if with_unassigned else set()) for span in _categories()[one]]
    return merge_ranges(spans, negated=False)


@cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    """Returns the ranges of characters of every category; takes 0.1 s, once."""
    found: dict[str, list[tuple[int, int]]] = {}
    begin, current = 0, unicodedata.category("\0")
    for code, category in enumerate(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        if category != current:
            found.setdefault(current, []).append((begin, code - 1))
            begin, current = code, category
    found.setdefault(current, []).append((begin, sys.maxunicode))
    return found
