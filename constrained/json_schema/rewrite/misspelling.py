"""Finds the keyword that an unknown name of a schema most likely misspells."""

from __future__ import annotations

from collections.abc import Iterable

_EXEMPT_STARTS = ("_", "$", "@", "x-", "X-")
_WORDS = frozenset(("cost", "cons", "ten", "the", "hen"))  # that are one letter from a short keyword
_SHORT = 5  # letters; a substituted letter makes most words of this length another word
_LONG = 8
_SPOKEN = {"property": "properties", "ref": "$ref", "patternproperty": "patternProperties"}


def misspelt_keyword(name: str, keywords: Iterable[str]) -> str | None:
    """Returns the keyword that a person who wrote `name` probably meant; None if `name` is another word.

    >>> [misspelt_keyword(name, ["minLength", "type", "items"]) for name in ("min_length", "typ", "itmes", "title")]
    ['minLength', 'type', 'items', None]
    """
    if name.startswith(_EXEMPT_STARTS):
        return None
    written = name.replace("_", "").replace("-", "").lower()
    if written in _SPOKEN:
        return _SPOKEN[written]
    if written in _WORDS:
        return None
    near = [keyword for keyword in keywords if len(keyword) > 3 and _is_near(written, keyword.lower())]
    return min(near, key=lambda keyword: (_distance(written, keyword.lower()), keyword)) if near else None


def _is_near(written: str, keyword: str) -> bool:
    if abs(len(written) - len(keyword)) > 2 or written[:1] != keyword[:1]:
        return False
    if len(keyword) > _SHORT:
        return _distance(written, keyword) <= (2 if len(keyword) >= _LONG else 1)
    is_missing_one = any(keyword[:i] + keyword[i + 1 :] == written for i in range(1, len(keyword)))
    is_doubled = any(keyword[: i + 1] + keyword[i:] == written for i in range(len(keyword)))
    swapped = [keyword[:i] + keyword[i + 1] + keyword[i] + keyword[i + 2 :] for i in range(1, len(keyword) - 1)]
    return written in (keyword, keyword + "s") or is_missing_one or is_doubled or written in swapped


def _distance(one: str, other: str) -> int:
    """Returns how many letters must be inserted, removed, replaced or swapped with the next one."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i in range(1, len(one) + 1):
        before, last, row = row, before, [i]
        for j in range(1, len(other) + 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (one[i - 1] != other[j - 1]))
            if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
