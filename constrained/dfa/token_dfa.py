"""Turns an automaton over bytes into one over tokens: which tokens each state allows, and where they lead.

Knows: states, bytes, and a prefix tree of tokens. Must not know: where the byte automaton came from. States
from which no complete text can be spelled with these tokens are left out, so no mask leads into a dead end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.constrained.byte_trie import ByteTrie, Int32Array, expand_slices

ByteTransition: TypeAlias = Callable[[Int32Array, NDArray[np.uint8]], Int32Array]
"""(states int32 [n], bytes uint8 [n]) -> next states int32 [n], -1 where there is none."""

TokenEdges: TypeAlias = tuple[Int32Array, Int32Array, Int32Array]
"""From state, token, to state; each int32 [E]."""

MAX_EDGES = 1_500_000
EDGES_BEFORE_PROJECTION = 400_000  # from here on it is foreseen, at the rate so far, how many there will be
MAX_PAIRS_PER_BATCH = 400_000
UNREACHABLE = np.iinfo(np.int32).max


class DfaTooLarge(Exception):
    """The token automaton has, or will have, more than `max_edges` edges."""


@dataclass(frozen=True, eq=False)
class TokenDfa:
    """A token automaton in rows: the edges of state s are `row_offsets[s] .. first[s + 1]`; state 0 is the start.

    `row_offsets` int32 [S+1], `tokens` int32 [E] ascending within a row, `next_states` int32 [E], `accepting` bool [S],
    and `distance` int32 [S], the fewest tokens from each state to an accepting one.
    """

    row_offsets: Int32Array
    tokens: Int32Array
    next_states: Int32Array
    accepting: NDArray[np.bool_]
    distance: Int32Array


def build_token_dfa(
    step: ByteTransition, start: int, accepting: NDArray[np.bool_], trie: ByteTrie, max_edges: int = MAX_EDGES
) -> TokenDfa | None:
    """The token automaton of a byte automaton, or None where no text of it can be spelled with these tokens.

    `accepting` is bool [states of the byte automaton]. Raises DfaTooLarge beyond `max_edges` edges, as soon as
    that many are to be expected. Method: the states and the tree are walked together (Willard and Louf 2023,
    arXiv:2307.09702), all states of a round at once.

    >>> words = ByteTrie([(0, b"ab"), (1, b"a")])
    >>> tokens = ByteTrie([(5, b"a"), (6, b"b"), (7, b"ab")])
    >>> table = build_token_dfa(words.step, 0, words.ends_here, tokens)
    >>> table.row_offsets.tolist(), table.tokens.tolist(), table.accepting.tolist()
    ([0, 2, 3, 3], [5, 7, 6], [False, True, True])
    """
    edges = _explore_edges(step, start, len(accepting), trie, max_edges)
    distance = _distances_to_accept(edges, accepting)
    if distance[start] == UNREACHABLE:
        return None
    return _to_csr(edges, distance, accepting, start, int(trie.entry_ids.max(initial=0)) + 1)


def _explore_edges(step: ByteTransition, start: int, num_states: int, trie: ByteTrie, max_edges: int) -> TokenEdges:
    seen = np.zeros(num_states, np.bool_)
    seen[start] = True
    todo, batch_size, num_edges, num_walked = np.array([start], np.int32), 4, 0, 0
    parts: list[TokenEdges] = []
    while len(todo):
        batch, todo = todo[:batch_size], todo[batch_size:]
        part, pairs = _expand_states(step, batch, trie)
        num_edges += len(part[0])
        num_walked += len(batch)
        parts.append(part)
        reached = np.unique(part[2])
        found = reached[~seen[reached]]
        seen[found] = True
        todo = np.concatenate((todo, found))
        projected_edges = num_edges * (1 + len(todo) / num_walked) if num_edges > EDGES_BEFORE_PROJECTION else num_edges
        if projected_edges > max_edges:
            raise DfaTooLarge
        batch_size = max(1, min(4 * batch_size, 4096, len(batch) * MAX_PAIRS_PER_BATCH // (pairs + 1)))
    sources, tokens, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    return sources, tokens, targets


def _expand_states(step: ByteTransition, sources: Int32Array, trie: ByteTrie) -> tuple[TokenEdges, int]:
    """The edges out of `sources`, and the number of (state, tree node) pairs it took."""
    origin = np.arange(len(sources), dtype=np.int32)  # which of the sources each pair belongs to
    states, nodes = sources, np.zeros(len(sources), np.int32)
    parts: list[TokenEdges] = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))]
    pairs = 0
    while len(nodes):
        children, parents = expand_slices(trie.child_offsets, nodes)
        reached = step(states[parents], trie.byte[children])
        kept = np.flatnonzero(reached >= 0)
        origin, states, nodes = origin[parents[kept]], reached[kept], children[kept].astype(np.int32)
        ended, pair = expand_slices(trie.entry_offsets, nodes)
        parts.append((sources[origin[pair]], trie.entry_ids[ended], states[pair]))
        pairs += len(children)
    source, token, target = (np.concatenate(column) for column in zip(*parts, strict=True))
    return (source, token, target), pairs


def _distances_to_accept(edges: TokenEdges, accepting: NDArray[np.bool_]) -> Int32Array:
    """For each state, the fewest tokens that lead from it to an accepting one; UNREACHED where none do."""
    links = np.unique(edges[2].astype(np.int64) * len(accepting) + edges[0])
    row_offsets = np.searchsorted(links // len(accepting), np.arange(len(accepting) + 1)).astype(np.int32)
    before = (links % len(accepting)).astype(np.int32)
    distance = np.where(accepting, 0, UNREACHABLE).astype(np.int32)
    frontier, steps = np.flatnonzero(accepting).astype(np.int32), 0
    while len(frontier):
        steps += 1
        reached = np.unique(before[expand_slices(row_offsets, frontier)[0]])
        frontier = reached[distance[reached] == UNREACHABLE]
        distance[frontier] = steps
    return distance


def _to_csr(edges: TokenEdges, distance: Int32Array, accepting: NDArray[np.bool_], start: int, width: int) -> TokenDfa:
    sources, tokens, targets = edges
    alive = distance != UNREACHABLE
    kept = alive[sources] & alive[targets]
    sources, tokens, targets = sources[kept], tokens[kept], targets[kept]
    states = np.unique(np.concatenate((np.array([start], np.int32), sources, targets)))
    states = np.concatenate((np.array([start], np.int32), states[states != start]))
    number = np.zeros(len(alive), np.int32)
    number[states] = np.arange(len(states), dtype=np.int32)
    rows = number[sources]
    order = np.argsort(rows.astype(np.int64) * width + tokens)
    row_offsets = np.searchsorted(rows[order], np.arange(len(states) + 1)).astype(np.int32)
    return TokenDfa(row_offsets, tokens[order], number[targets[order]], accepting[states], distance[states])


def shortest_completion(table: TokenDfa, state: int) -> list[int]:
    """The tokens of a shortest way from `state` to an accepting one: of equals, the lowest ids.

    >>> shortest(table, 0)                              # doctest: +SKIP
    [5, 7]
    """
    tokens: list[int] = []
    while table.distance[state]:
        row = slice(int(table.row_offsets[state]), int(table.row_offsets[state + 1]))
        best = int(table.distance[table.next_states[row]].argmin())
        tokens.append(int(table.tokens[row][best]))
        state = int(table.next_states[row][best])
    return tokens
