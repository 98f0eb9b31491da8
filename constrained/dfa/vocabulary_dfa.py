"""A token automaton with the token tries that its edges refer to: where a token leads, and what a state allows."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.tokens.byte_trie import Int32Array
from plait.constrained.tokens.token_trie import TokenTrie
from plait.constrained.tokens.vocabulary import Vocabulary


class Row(NamedTuple):
    """The edges of one state: the nodes of `trie` at which its tokens end, ascending, and the state after each."""

    trie: TokenTrie
    nodes: Int32Array
    next_states: Int32Array


class VocabularyDfa:
    """`table` for `vocabulary`. Takes milliseconds if the vocabulary has not built the tries before.

    >>> VocabularyDfa(table, vocabulary).next_state(0, token)             # doctest: +SKIP
    3
    """

    def __init__(self, table: TokenDfa, vocabulary: Vocabulary) -> None:
        self.table = table
        self.vocabulary = vocabulary
        self.tries = [vocabulary.token_tries.get(partition) for partition in table.partitions]
        self.accepting: list[bool] = table.accepting.tolist()
        # Indexing a memoryview gives Python ints and is several times faster than indexing a numpy array.
        self.row_offsets = np.ascontiguousarray(table.row_offsets).data
        self._nodes = np.ascontiguousarray(table.nodes).data
        self._next_states = np.ascontiguousarray(table.next_states).data
        self._nodes_of_token = [trie.node_of_token.data for trie in self.tries]
        self._partition_of = table.partition_of.tobytes()
        self._width = len(vocabulary)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, tries included."""
        table = self.table
        arrays = (table.row_offsets, table.nodes, table.next_states, table.distance)
        return sum(array.nbytes for array in arrays) + sum(trie.nbytes for trie in self.tries)

    def row(self, state: int) -> Row:
        """Returns the edges of `state`."""
        edges = slice(self.row_offsets[state], self.row_offsets[state + 1])
        return Row(self.tries[self._partition_of[state]], self.table.nodes[edges], self.table.next_states[edges])

    def has_edges(self, state: int) -> bool:
        """Returns whether a text may continue after `state`."""
        return bool(self.row_offsets[state] != self.row_offsets[state + 1])

    def next_state(self, state: int, token: int) -> int | None:
        """Returns the state after `token`; None if it is not allowed."""
        if not 0 <= token < self._width:
            return None
        node = self._nodes_of_token[self._partition_of[state]][token]
        end = self.row_offsets[state + 1]
        place = bisect_left(self._nodes, node, self.row_offsets[state], end)
        if place == end or self._nodes[place] != node:
            return None
        return self._next_states[place]

    def state_after(self, state: int, tokens: list[int]) -> int | None:
        """Returns the state after `tokens`; None if they are not allowed."""
        after: int | None = state
        for token in tokens:
            after = None if after is None else self.next_state(after, token)
        return after

    def allowed(self, state: int) -> NDArray[np.bool_]:
        """Returns for each token whether `state` allows it, bool [V]; no end tokens."""
        trie, nodes, _ = self.row(state)
        if not trie.has_entry_lists:
            return trie.members(nodes)
        is_allowed = np.zeros(self._width, np.bool_)
        is_allowed[trie.tokens_at(nodes)] = True
        return is_allowed

    def shortest_completion(self, state: int) -> list[int]:
        """Returns the tokens of a shortest path to an accepting state; of equal ones, the lowest ids.

        >>> dfa.shortest_completion(0)                                    # doctest: +SKIP
        [5, 7]
        """
        tokens: list[int] = []
        while self.table.distance[state]:
            trie, nodes, next_states = self.row(state)
            distance = self.table.distance[next_states]
            nearest = np.flatnonzero(distance == distance.min())
            lowest = trie.lowest_token[nodes[nearest]]
            best = int(lowest.argmin())
            tokens.append(int(lowest[best]))
            state = int(next_states[nearest[best]])
        return tokens
