"""Classes of characters beyond ASCII as rows of a byte automaton: which bytes lead to which character class.

The rows of a class are computed once and copied for each state of a pattern in which the class may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from plait.constrained.regex.char_classes import Ranges
from plait.constrained.tokens.byte_trie import Int32Array

NO_BYTE = -1
Node: TypeAlias = "dict[int, Node | int]"  # by the bits of the next byte; an int is the place of a class
_LENGTHS = ((0x80, 0x7FF, 6, 0xC0), (0x800, 0xFFFF, 12, 0xE0), (0x10000, 0x10FFFF, 18, 0xF0))


def utf8_rows(classes: Sequence[Ranges]) -> Int32Array:
    """Returns the rows int32 [R, 256] of disjoint classes beyond ASCII. Row 0 is for the first byte of a character.

    An entry is the row for the next byte (> 0), -2 - k at the end of a character of class k, or NO_BYTE (-1).

    >>> rows = utf8_rows([((0xE9, 0xE9),)])
    >>> rows[0, 0xC3], rows[1, 0xA9], len(rows)
    (np.int32(1), np.int32(-2), 2)
    """
    lead: Node = {}
    full: dict[tuple[int, int], Node] = {}  # shared by all blocks that belong to one class as a whole
    for place, ranges in enumerate(classes):
        for low, high in ranges:
            for begin, end, shift, mark in _LENGTHS:
                a, b = max(low, begin), min(high, end)
                if a <= b:
                    _insert(lead, a, b, shift, mark, place, full)
    rows: list[dict[int, int]] = []
    _number(lead, rows, {}, {})
    numbered = np.full((len(rows), 256), NO_BYTE, np.int32)
    for index, row in enumerate(rows):  # the row for the first byte is numbered last
        numbered[len(rows) - 1 - index, list(row)] = [-2 - ~to if to < 0 else len(rows) - 1 - to for to in row.values()]
    return numbered


def _insert(
    node: Node, low: int, high: int, shift: int, mark: int, place: int, full: dict[tuple[int, int], Node]
) -> None:
    """Adds the characters `low` to `high`, given by their last bits, of which `shift` belong to later bytes."""
    for bits in range(low >> shift, (high >> shift) + 1):
        begin = bits << shift
        a, b = max(low - begin, 0), min(high - begin, (1 << shift) - 1)
        if not shift:
            node[mark | bits] = place
        elif b - a + 1 == 1 << shift:
            node[mark | bits] = _full_block(shift - 6, place, full)
        else:
            inner = node.setdefault(mark | bits, {})
            assert isinstance(inner, dict)
            _insert(inner, a, b, shift - 6, 0x80, place, full)


def _full_block(shift: int, place: int, full: dict[tuple[int, int], Node]) -> Node:
    if (shift, place) not in full:
        inner = _full_block(shift - 6, place, full) if shift else place
        full[shift, place] = {0x80 | bits: inner for bits in range(64)}
    return full[shift, place]


def _number(
    node: Node, rows: list[dict[int, int]], known: dict[tuple[tuple[int, int], ...], int], seen: dict[int, int]
) -> int:
    """Appends the rows of `node`, equal ones once, each after those that it leads to. Returns the place of its own."""
    if id(node) not in seen:
        row = {byte: ~to if isinstance(to, int) else _number(to, rows, known, seen) for byte, to in node.items()}
        key = tuple(sorted(row.items()))
        if key not in known:
            known[key] = len(rows)
            rows.append(row)
        seen[id(node)] = known[key]
    return seen[id(node)]


def split_classes(classes: Sequence[Ranges]) -> list[tuple[Ranges, tuple[int, ...]]]:
    """Splits classes that may overlap into disjoint ones, each with the places of those that it belongs to.

    >>> split_classes([((1, 5),), ((4, 9), (20, 20))])
    [(((1, 3),), (0,)), (((4, 5),), (0, 1)), (((6, 9), (20, 20)), (1,))]
    """
    if len(classes) == 1:
        return [(classes[0], (0,))]
    edges = [(at, place) for place, ranges in enumerate(classes) for low, high in ranges for at in (low, high + 1)]
    pieces: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    inside, before = set[int](), 0
    for at, place in sorted(edges):
        if inside and at > before:
            pieces.setdefault(tuple(sorted(inside)), []).append((before, at - 1))
        inside ^= {place}
        before = at
    return [(tuple(ranges), places) for places, ranges in pieces.items()]
