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

from plait.runtime.batch.request import ScheduledRequest
from plait.runtime.kv_cache.radix_tree import RadixNode

PrefixPosition = (
    RadixNode | tuple[RadixNode, int] | None
)  # where a row stands; with a number: only so many tokens are its cache


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

    `align`: lengths are multiples of it. `group_cost`: how many tokens a group must spare before it is worth one. `max_row_tokens`:
    rows that bring more new tokens stay out.
    """

    def __init__(self, align: int = 1, group_cost: int = 0, max_row_tokens: int = 1 << 30) -> None:
        self.align, self.group_cost, self.max_row_tokens = align, group_cost, max_row_tokens
        self._positions: list[PrefixPosition] = []
        self._found: list[PrefixGroup] = []

    def find(self, rows: Sequence[ScheduledRequest]) -> list[PrefixGroup]:
        """Disjoint groups of two rows or more, those that spare most first: of all ways to put each row into one group
        or none the one that spares most, costs subtracted. What a group shares is each member's cache, never one of its
        new tokens. The list is this object's own."""
        max_row_tokens = self.max_row_tokens
        positions: list[PrefixPosition] = [
            (node if each.start >= seq.num_in_tree else (node, each.start))
            if each.count <= max_row_tokens and (node := (seq := each.request.seq).node) is not None
            else None
            for each in rows
        ]
        if positions != self._positions:
            self._positions = positions
            trie_nodes = _trie(self._shared_nodes(positions), self.align)
            self._found = _best_groups(trie_nodes, self.group_cost) if trie_nodes else []
        return self._found

    def _shared_nodes(self, positions: list[PrefixPosition]) -> dict[RadixNode, list[int]]:
        """For each row the last node on its way that others run on, too; only what is long enough. A row whose new
        tokens begin within a node (which then was published late) stands before that node."""
        found: dict[RadixNode, list[int]] = {}
        for i, place in enumerate(positions):
            if place is None:
                continue
            node, most = place if isinstance(place, tuple) else (place, place.end)
            while (node.lock_count < 2 or node.end > most) and node.parent is not None:
                node = node.parent
            if node.end >= self.align:
                found.setdefault(node, []).append(i)
        return found


@dataclass(slots=True)
class _TrieNode:
    """A node at which rows of the batch stand or part."""

    length: int
    rows: list[int]
    below: list[_TrieNode]
    level: int = 0  # the place of `length` among all spots' lengths, 0 among them
    # What the rows from here down spare at best: if an upper group spares each of them the length of that level ...
    saved_without_group: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    saved_with_group: int = 0  # ... and if there is a group of this length


def _trie(shared: dict[RadixNode, list[int]], align: int) -> list[_TrieNode]:
    """The spots, each behind all that are below it."""
    children: dict[RadixNode, list[RadixNode]] = {node: [] for node in shared}
    for node in shared:
        while (parent := node.parent) is not None and parent.end >= align:
            if parent in children:  # from there on the way is another's
                children[parent].append(node)
                break
            children[parent] = [node]
            node = parent
    reached: dict[RadixNode, _TrieNode] = {}
    trie_nodes: list[_TrieNode] = []
    for node in sorted(children, key=lambda each: each.end, reverse=True):
        below = [reached[child] for child in children[node]]
        if len(below) == 1 and node not in shared:
            reached[node] = below[0]
            continue
        reached[node] = _TrieNode(node.end // align * align, shared.get(node, []), below)
        trie_nodes.append(reached[node])
    return trie_nodes


def _best_groups(trie_nodes: list[_TrieNode], group_cost: int) -> list[PrefixGroup]:
    """Upward, what is spared with and without a group at each spot, for each length that an upper group may have;
    then downward, which it is."""
    levels = sorted({0, *(trie_node.length for trie_node in trie_nodes)})
    level_of, lengths = {length: i for i, length in enumerate(levels)}, np.array(levels, dtype=np.int64)
    tops = {id(trie_node): trie_node for trie_node in trie_nodes}
    for trie_node in trie_nodes:
        trie_node.level = level_of[trie_node.length]
        trie_node.saved_without_group = lengths * len(trie_node.rows)
        for each in trie_node.below:
            trie_node.saved_without_group += np.maximum(each.saved_without_group, each.saved_with_group)
            del tops[id(each)]
        trie_node.saved_with_group = int(trie_node.saved_without_group[trie_node.level]) - trie_node.length - group_cost
    found: list[PrefixGroup] = []
    todo: list[tuple[_TrieNode, int, list[int] | None]] = [(trie_node, 0, None) for trie_node in tops.values()]
    while todo:
        trie_node, level, members = todo.pop()
        if trie_node.saved_with_group > trie_node.saved_without_group[level]:
            level, members = trie_node.level, []
            found.append(PrefixGroup(members, trie_node.length))
        if members is not None:
            members += trie_node.rows
        todo += [(each, level, members) for each in trie_node.below]
    for group in found:
        group.rows.sort()
    return sorted(found, key=lambda group: (-group.num_spared, group.rows))
