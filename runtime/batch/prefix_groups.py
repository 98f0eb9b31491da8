"""Groups the requests of a batch that share a prefix, so that attention can read its KV once for all of them.

    root ─ [system prompt] ─┬─ [question]   rows 0, 1         groups: (0, 1) share prompt and question,
                            └─ [example] ─┬─ [..]  row 2              (2, 3) prompt and example;
                                          └─ [..]  row 3      or (0, 1, 2, 3) the prompt: whichever saves more

Every page is in one node of the radix tree, so two requests share the pages of their common ancestors. No page table is
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.kv_cache.radix_node import RadixNode

# The node in which a row's cached tokens end; with a number if only that many tokens from the root on are cached.
PrefixPosition = RadixNode | tuple[RadixNode, int] | None


class PrefixGroup(NamedTuple):
    """Rows (indices in the batch, ascending) whose first `num_tokens` tokens have the same pages."""

    rows: list[int]
    num_tokens: int

    @property
    def num_saved_reads(self) -> int:
        """Tokens whose KV need not be read again."""
        return (len(self.rows) - 1) * self.num_tokens


class PrefixGroups:
    """Finds the groups of each step's batch, and reuses the previous result while the rows' positions stay the same.

    `align`: group lengths are multiples of it. `group_cost`: tokens that a group must save to be worthwhile.
    `max_row_tokens`: rows with more new tokens are not grouped.
    """

    def __init__(self, align: int = 1, group_cost: int = 0, max_row_tokens: int = 1 << 30) -> None:
        self.align, self.group_cost, self.max_row_tokens = align, group_cost, max_row_tokens
        self._positions: list[PrefixPosition] = []
        self._groups: list[PrefixGroup] = []

    def find(self, rows: Sequence[ScheduledRequest]) -> list[PrefixGroup]:
        """Returns disjoint groups of at least two rows, those that save most first.

        Of all ways to put each row into at most one group, this is the one that saves most tokens after subtracting
        the costs. A group covers only cached tokens of its rows, never their new tokens. The caller must not change
        the list.
        """
        max_row_tokens = self.max_row_tokens
        positions: list[PrefixPosition] = [
            (node if scheduled.start >= seq.num_in_tree else (node, scheduled.start))
            if scheduled.count <= max_row_tokens and (node := (seq := scheduled.request.seq).node) is not None
            else None
            for scheduled in rows
        ]
        if positions != self._positions:
            self._positions = positions
            trie_nodes = _build_trie(self._shared_nodes(positions), self.align)
            self._groups = _best_groups(trie_nodes, self.group_cost) if trie_nodes else []
        return self._groups

    def _shared_nodes(self, positions: list[PrefixPosition]) -> dict[RadixNode, list[int]]:
        """Maps nodes to rows: each row to the last node on its path that other requests lock, too.

        Omits rows for which this node ends before `align` tokens. If a row's new tokens begin inside a node (published
        by `publish_early`), the row counts as ending before that node.
        """
        rows_at: dict[RadixNode, list[int]] = {}
        for row, position in enumerate(positions):
            if position is None:
                continue
            node, num_cached = position if isinstance(position, tuple) else (position, position.end)
            while (node.lock_count < 2 or node.end > num_cached) and node.parent is not None:
                node = node.parent
            if node.end >= self.align:
                rows_at.setdefault(node, []).append(row)
        return rows_at


@dataclass(slots=True)
class _TrieNode:
    """A radix node at which rows of the batch end or branch.

    `length`: tokens from the root, rounded down to the alignment. `level`: index of `length` among all nodes' lengths.
    `saved_without_group[l]`: tokens saved at best by the rows in this subtree, if a group above covers the length of
    level l. `saved_with_group`: the same if there is a group of this node's length.
    """

    length: int
    rows: list[int]
    children: list[_TrieNode]
    level: int = 0
    saved_without_group: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    saved_with_group: int = 0


def _build_trie(rows_at: dict[RadixNode, list[int]], align: int) -> list[_TrieNode]:
    """Returns the trie's nodes, children before parents. Nodes with one child and no row are left out."""
    children: dict[RadixNode, list[RadixNode]] = {node: [] for node in rows_at}
    for node in rows_at:
        while (parent := node.parent) is not None and parent.end >= align:
            if parent in children:  # another row's path has covered the rest
                children[parent].append(node)
                break
            children[parent] = [node]
            node = parent
    trie_node_of: dict[RadixNode, _TrieNode] = {}
    trie_nodes: list[_TrieNode] = []
    for node in sorted(children, key=lambda node: node.end, reverse=True):
        child_nodes = [trie_node_of[child] for child in children[node]]
        if len(child_nodes) == 1 and node not in rows_at:
            trie_node_of[node] = child_nodes[0]
            continue
        trie_node_of[node] = _TrieNode(node.end // align * align, rows_at.get(node, []), child_nodes)
        trie_nodes.append(trie_node_of[node])
    return trie_nodes


def _best_groups(trie_nodes: list[_TrieNode], group_cost: int) -> list[PrefixGroup]:
    """Dynamic programming over the trie.

    Bottom-up, computes what each subtree saves with and without a group at its top, for each length that a group above
    may cover. Then chooses the groups top-down.
    """
    top_nodes = _compute_savings(trie_nodes, group_cost)
    groups: list[PrefixGroup] = []
    stack: list[tuple[_TrieNode, int, list[int] | None]] = [(node, 0, None) for node in top_nodes]
    while stack:
        trie_node, level, members = stack.pop()
        if trie_node.saved_with_group > trie_node.saved_without_group[level]:
            level, members = trie_node.level, []
            groups.append(PrefixGroup(members, trie_node.length))
        if members is not None:
            members += trie_node.rows
        stack += [(child, level, members) for child in trie_node.children]
    for group in groups:
        group.rows.sort()
    return sorted(groups, key=lambda group: (-group.num_saved_reads, group.rows))


def _compute_savings(trie_nodes: list[_TrieNode], group_cost: int) -> list[_TrieNode]:
    """Fills in `level`, `saved_without_group` and `saved_with_group`; returns the nodes without a parent."""
    levels = sorted({0, *(trie_node.length for trie_node in trie_nodes)})
    level_of, lengths = {length: level for level, length in enumerate(levels)}, np.array(levels, dtype=np.int64)
    top_nodes = {id(trie_node): trie_node for trie_node in trie_nodes}
    for trie_node in trie_nodes:
        trie_node.level = level_of[trie_node.length]
        trie_node.saved_without_group = lengths * len(trie_node.rows)
        for child in trie_node.children:
            trie_node.saved_without_group += np.maximum(child.saved_without_group, child.saved_with_group)
            del top_nodes[id(child)]
        trie_node.saved_with_group = int(trie_node.saved_without_group[trie_node.level]) - trie_node.length - group_cost
    return list(top_nodes.values())
