"""Converts an automaton over bytes into one over tokens: which tokens each state allows, and where they lead.

States from which the tokens cannot complete a text are removed, so no mask leads into a dead end.
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
EDGES_BEFORE_PROJECTION = 400_000  # from here on the final number is projected from the rate so far
MAX_PAIRS_PER_BATCH = 400_000
UNREACHABLE = np.iinfo(np.int32).max


class DfaTooLarge(Exception):
    """The token automaton has, or is projected to have, more than `max_edges` edges."""


@dataclass(frozen=True, eq=False)
class TokenDfa:
    """A token automaton in CSR form: the edges of state s are `row_offsets[s] .. row_offsets[s + 1]`; state 0 starts.

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
    """Returns the token automaton of a byte automaton, or None if the tokens can spell none of its texts.

    `accepting` is bool [states of the byte automaton]. Raises DfaTooLarge as soon as more than `max_edges` edges are
    projected. Method: states and token trie are traversed together (Willard and Louf 2023, arXiv:2307.09702), many
    states at a time.

    >>> words = ByteTrie([(0, b"ab"), (1, b"a")])
    >>> tokens = ByteTrie([(5, b"a"), (6, b"b"), (7, b"ab")])
    >>> table = build_token_dfa(words.step, 0, words.is_terminal, tokens)
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
        new_states = _distinct(part[2], num_states)
        new_states = new_states[~seen[new_states]]
        seen[new_states] = True
        todo = np.concatenate((todo, new_states))
        projected_edges = num_edges * (1 + len(todo) / num_walked) if num_edges > EDGES_BEFORE_PROJECTION else num_edges
        if projected_edges > max_edges:
            raise DfaTooLarge
        batch_size = max(1, min(4 * batch_size, 4096, len(batch) * MAX_PAIRS_PER_BATCH // (pairs + 1)))
    sources, tokens, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    return sources, tokens, targets


def _expand_states(step: ByteTransition, sources: Int32Array, trie: ByteTrie) -> tuple[TokenEdges, int]:
    """Returns the edges out of `sources`, and the number of (state, trie node) pairs visited."""
    origin = np.arange(len(sources), dtype=np.int32)  # the index in `sources` that each pair belongs to
    states, nodes = sources, np.zeros(len(sources), np.int32)
    parts: list[TokenEdges] = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))]
    pairs = 0
    while len(nodes):
        children, parents = expand_slices(trie.child_offsets, nodes)
        reached = step(states[parents], trie.byte[children])
        valid = np.flatnonzero(reached >= 0)
        origin, states, nodes = origin[parents[valid]], reached[valid], children[valid].astype(np.int32)
        ended, pair = expand_slices(trie.entry_offsets, nodes)
        parts.append((sources[origin[pair]], trie.entry_ids[ended], states[pair]))
        pairs += len(children)
    source, token, target = (np.concatenate(column) for column in zip(*parts, strict=True))
    return (source, token, target), pairs


def _distances_to_accept(edges: TokenEdges, accepting: NDArray[np.bool_]) -> Int32Array:
    """Returns for each state the fewest tokens to an accepting state; UNREACHABLE if there is no path."""
    links = _distinct(edges[2].astype(np.int64) * len(accepting) + edges[0], len(accepting) ** 2)
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


def _distinct(numbers: NDArray[np.signedinteger], end: int) -> NDArray[np.signedinteger]:
    """Returns the distinct `numbers`, which lie in [0, end), in ascending order and in their own type."""
    if end > 8 * len(numbers) + 4096:
        return np.unique(numbers)
    marked = np.zeros(end, np.bool_)  # faster than sorting or hashing
    marked[numbers] = True
    return np.flatnonzero(marked).astype(numbers.dtype)


def _to_csr(edges: TokenEdges, distance: Int32Array, accepting: NDArray[np.bool_], start: int, width: int) -> TokenDfa:
    sources, tokens, targets = edges
    alive = distance != UNREACHABLE
    is_live_edge = alive[sources] & alive[targets]
    if not is_live_edge.all():
        sources, tokens, targets = sources[is_live_edge], tokens[is_live_edge], targets[is_live_edge]
    is_state = np.zeros(len(alive), np.bool_)
    for column in (start, sources, targets):
        is_state[column] = True
    states = np.flatnonzero(is_state).astype(np.int32)
    states = np.concatenate((np.array([start], np.int32), states[states != start]))
    number = np.zeros(len(alive), np.int32)
    number[states] = np.arange(len(states), dtype=np.int32)
    places = number[sources].astype(np.int64) * width + tokens
    sorted_places, next_states = _sort_by_place(places, number[targets], len(states) * width)
    row_offsets = np.searchsorted(sorted_places, np.arange(len(states) + 1) * width).astype(np.int32)
    tokens = (sorted_places % width).astype(np.int32)
    return TokenDfa(row_offsets, tokens, next_states, accepting[states], distance[states])


def _sort_by_place(places: NDArray[np.int64], values: Int32Array, end: int) -> tuple[NDArray[np.int64], Int32Array]:
    """Sorts distinct `places`, which lie in [0, end), and their `values`."""
    if end > 8 * len(places) + 4096:
        order = np.argsort(places)
        return places[order], values[order]
    dense = np.full(end, -1, np.int32)  # faster than sorting
    dense[places] = values
    sorted_places = np.flatnonzero(dense >= 0)
    return sorted_places, dense[sorted_places]


def shortest_completion(table: TokenDfa, state: int) -> list[int]:
    """Returns the tokens of a shortest path from `state` to an accepting state; of equal ones, the lowest ids.

    >>> shortest_completion(table, 0)                   # doctest: +SKIP
    [5, 7]
    """
    tokens: list[int] = []
    while table.distance[state]:
        row = slice(int(table.row_offsets[state]), int(table.row_offsets[state + 1]))
        best = int(table.distance[table.next_states[row]].argmin())
        tokens.append(int(table.tokens[row][best]))
        state = int(table.next_states[row][best])
    return tokens
