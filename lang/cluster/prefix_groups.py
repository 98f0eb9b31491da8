"""Groups the items of a batch whose prompts probably share a long prefix, so that one actor computes it.

What a program makes of its arguments is known only when it runs. So items count as sharing a prefix if they share the
beginning of an argument: a document, an instruction, a conversation so far. A wrong guess costs nothing but the chance.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

MIN_SHARED_CHARS = 200  # of an argument, about 50 tokens; a shorter prefix is computed anew in the time of a message


def group_items(items: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Returns the indexes of the items in groups, the largest group first. Similar items are neighbours in a group.

    >>> book = "It was a dark and stormy night. " * 10
    >>> texts = [book, "short", book, "other"]
    >>> group_items({index: {"text": text} for index, text in enumerate(texts)})
    [[0, 2], [1], [3]]
    """
    texts = {index: {name: _text(value) for name, value in item.items()} for index, item in items.items()}
    names = _names_by_sharing(list(texts.values()))
    if not names:
        return [[index] for index in items]
    keys = {index: [item.get(name, "") for name in names] for index, item in texts.items()}
    ordered = sorted(items, key=lambda index: (keys[index], index))
    common = num_common_chars(keys[ordered[0]][0], keys[ordered[-1]][0])
    groups = [[ordered[0]]]
    for before, index in itertools.pairwise(ordered):
        if num_common_chars(keys[before][0], keys[index][0]) >= common + MIN_SHARED_CHARS:
            groups[-1].append(index)
        else:
            groups.append([index])
    return sorted(groups, key=lambda group: (-len(group), min(group)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _names_by_sharing(items: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the arguments that some items share and not all, the one first of which most text is shared."""
    saved: dict[str, int] = {}
    for name in dict.fromkeys(name for item in items for name in item):
        values = sorted(item.get(name, "") for item in items)
        common = num_common_chars(values[0], values[-1])
        shared = (num_common_chars(*pair) - common for pair in itertools.pairwise(values))
        saved[name] = sum(chars for chars in shared if chars >= MIN_SHARED_CHARS)
    return sorted((name for name, chars in saved.items() if chars), key=lambda name: -saved[name])


def num_common_chars(one: str, other: str) -> int:
    """Returns the length of the longest common prefix, by binary search: slices are compared much faster than letters.

    >>> num_common_chars("abcd", "abxd"), num_common_chars("ab", "abc"), num_common_chars("", "a")
    (2, 2, 0)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:  # the first `low` characters are equal
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
