"""Which rows of a batch begin with the same pages, so that attention may read those once for all of them.

    root ─ [system prompt] ─┬─ [question]   rows 0, 1         groups: (0, 1) share prompt and question,
                            └─ [example] ─┬─ [..]  row 2              (2, 3) prompt and example;
                                          └─ [..]  row 3      or (0, 1, 2, 3) the prompt: whichever spares more

A page stands in one node of the radix tree, so rows share what lies on both of their ways to the root: no page table is
read. Knows: rows, nodes. Must not know: tensors, what a kernel does with groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.runtime.scheduler.radix_tree import Node
from plait.runtime.scheduler.rows import BatchRow

Standing = Node | tuple[Node, int] | None  # where a row stands; with a number: only so many tokens are its cache


class PrefixGroup(NamedTuple):
    """Rows (their places in the batch, ascending) whose first `num_tokens` tokens lie in the same pages."""

    rows: list[int]
    num_tokens: int

    @property
    def num_spared(self) -> int:
        """Tokens of KV that need not be read again."""
        return (len(self.rows) - 1) * self.num_tokens


class PrefixGroups:
    """Finds the groups of each step's batch; while its rows stand where they stood, those of the step before.

    `align`: lengths are multiples of it. `cost`: how many tokens a group must spare before it is worth one. `widest`:
    rows that bring more new tokens stay out.
    """

    def __init__(self, align: int = 1, cost: int = 0, widest: int = 1 << 30) -> None:
        self.align, self.cost, self.widest = align, cost, widest
        self._standing: list[Standing] = []
        self._found: list[PrefixGroup] = []

    def find(self, rows: Sequence[BatchRow]) -> list[PrefixGroup]:
        """Disjoint groups of two rows or more, those that spare most first: of all ways to put each row into one group
        or none the one that spares most, costs subtracted. What a group shares is each member's cache, never one of its
        new tokens. The list is this object's own."""
        widest = self.widest
        standing: list[Standing] = [
            (node if each.start >= seq.num_in_tree else (node, each.start))
            if each.count <= widest and (node := (seq := each.row.seq).node) is not None
            else None
            for each in rows
        ]
        if standing != self._standing:
            self._standing = standing
            spots = _trie(self._shared_nodes(standing), self.align)
            self._found = _best(spots, self.cost) if spots else []
        return self._found

    def _shared_nodes(self, standing: list[Standing]) -> dict[Node, list[int]]:
        """For each row the last node on its way that others run on, too; only what is long enough. A row whose new
        tokens begin within a node (which then was published late) stands before that node."""
        found: dict[Node, list[int]] = {}
        for i, place in enumerate(standing):
            if place is None:
                continue
            node, most = place if isinstance(place, tuple) else (place, place.end)
            while (node.lock_count < 2 or node.end > most) and node.parent is not None:
                node = node.parent
            if node.end >= self.align:
                found.setdefault(node, []).append(i)
        return found


@dataclass(slots=True)
class _Spot:
    """A node at which rows of the batch stand or part."""

    length: int
    rows: list[int]
    below: list[_Spot]
    level: int = 0  # the place of `length` among all spots' lengths, 0 among them
    # What the rows from here down spare at best: if an upper group spares each of them the length of that level ...
    outside: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    own: int = 0  # ... and if there is a group of this length


def _trie(shared: dict[Node, list[int]], align: int) -> list[_Spot]:
    """The spots, each behind all that are below it."""
    children: dict[Node, list[Node]] = {node: [] for node in shared}
    for node in shared:
        while (parent := node.parent) is not None and parent.end >= align:
            if parent in children:  # from there on the way is another's
                children[parent].append(node)
                break
            children[parent] = [node]
            node = parent
    reached: dict[Node, _Spot] = {}
    spots: list[_Spot] = []
    for node in sorted(children, key=lambda each: each.end, reverse=True):
        below = [reached[child] for child in children[node]]
        if len(below) == 1 and node not in shared:
            reached[node] = below[0]
            continue
        reached[node] = _Spot(node.end // align * align, shared.get(node, []), below)
        spots.append(reached[node])
    return spots


def _best(spots: list[_Spot], cost: int) -> list[PrefixGroup]:
    """Upward, what is spared with and without a group at each spot, for each length that an upper group may have;
    then downward, which it is."""
    levels = sorted({0, *(spot.length for spot in spots)})
    level_of, lengths = {length: i for i, length in enumerate(levels)}, np.array(levels, dtype=np.int64)
    tops = {id(spot): spot for spot in spots}
    for spot in spots:
        spot.level = level_of[spot.length]
        spot.outside = lengths * len(spot.rows)
        for each in spot.below:
            spot.outside += np.maximum(each.outside, each.own)
            del tops[id(each)]
        spot.own = int(spot.outside[spot.level]) - spot.length - cost
    found: list[PrefixGroup] = []
    todo: list[tuple[_Spot, int, list[int] | None]] = [(spot, 0, None) for spot in tops.values()]
    while todo:
        spot, level, members = todo.pop()
        if spot.own > spot.outside[level]:
            level, members = spot.level, []
            found.append(PrefixGroup(members, spot.length))
        if members is not None:
            members += spot.rows
        todo += [(each, level, members) for each in spot.below]
    for group in found:
        group.rows.sort()
    return sorted(found, key=lambda group: (-group.num_spared, group.rows))
