"""Converts an automaton over bytes into one over tokens: which tokens each state allows, and where they lead.

States from which the tokens cannot complete a text are removed, so no mask leads into a dead end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.constrained.tokens.byte_trie import Int32Array, expand_slices
from plait.constrained.tokens.token_trie import DEAD_CLASS, SINGLE_BYTES, TokenTrie
from plait.constrained.tokens.vocabulary import Vocabulary

ByteTransition: TypeAlias = Callable[[Int32Array, NDArray[np.uint8]], Int32Array]
"""(states int32 [n], bytes uint8 [n]) -> next states int32 [n], -1 where there is none."""

TokenEdges: TypeAlias = tuple[Int32Array, Int32Array, Int32Array]
"""From state, node of a token trie, to state; each int32 [E]."""

MAX_EDGES = 1_500_000
EDGES_BEFORE_PROJECTION = 400_000  # from here on the final number is projected from the rate so far
MAX_PAIRS_PER_BATCH = 400_000
UNREACHABLE = np.iinfo(np.int32).max


class DfaTooLarge(Exception):
    """The token automaton has, or is projected to have, more edges than allowed, or takes too much work to build."""


class WalkLimits(NamedTuple):
    """The most edges of a token automaton, and the most pairs of a state and a trie node visited to find them."""

    edges: int = MAX_EDGES
    pairs: float = math.inf


NO_LIMITS = WalkLimits()  # but that of memory


@dataclass(frozen=True, eq=False)
class TokenDfa:
    """A token automaton in CSR form: the edges of state s are `row_offsets[s] .. row_offsets[s + 1]`; state 0 starts.

    An edge leads from a state along all tokens that end at one node of a TokenTrie: of the one for
    `partitions[partition_of[s]]` (uint8 [S]). `row_offsets` int32 [S+1], `nodes` int32 [E] ascending within a row,
    `next_states` int32 [E], `accepting` bool [S], and `distance` int32 [S], the fewest tokens from each state to an
    accepting one.
    """

    partitions: tuple[bytes, ...]
    partition_of: NDArray[np.uint8]
    row_offsets: Int32Array
    nodes: Int32Array
    next_states: Int32Array
    accepting: NDArray[np.bool_]
    distance: Int32Array


def build_token_dfa(
    step: ByteTransition,
    start: int,
    accepting: NDArray[np.bool_],
    vocabulary: Vocabulary,
    states: StatePartitions | None = None,
    limits: WalkLimits = NO_LIMITS,
) -> TokenDfa | None:
    """Returns the token automaton of a byte automaton, or None if the tokens can spell none of its texts.

    `accepting` is bool [states of the byte automaton]; `states` says which bytes each state distinguishes (None: all).
    Raises DfaTooLarge as soon as more than `limits` are projected. Method: states and token trie are traversed together
    (Willard and Louf 2023, arXiv:2307.09702), many states at a time, each with the trie of its partition.

    >>> build_token_dfa(words.step, 0, words.is_terminal, vocabulary).accepting.tolist()          # doctest: +SKIP
    [False, True, True]
    """
    states = states or single_bytes(len(accepting))
    walk = _Walk(step, states, vocabulary, limits)
    edges = walk.explore(start)
    distance = _distances_to_accept(edges, accepting)
    if distance[start] == UNREACHABLE:
        return None
    return _to_csr(edges, distance, accepting, start, states, max(map(len, walk.tries.values())))


def build_table_dfa(
    transitions: Int32Array,
    start: int,
    accepting: NDArray[np.bool_],
    vocabulary: Vocabulary,
    limits: WalkLimits = NO_LIMITS,
) -> TokenDfa | None:
    """Returns `build_token_dfa` of a byte automaton given by its next states, int32 [S, 256], -1 where there is none.

    Bytes that a state and all states after it treat alike are walked once.
    """
    transitions = _without_dead_states(transitions, accepting)
    states = state_partitions(transitions, vocabulary.trie.num_by_first_byte)
    return build_token_dfa(lambda at, by: transitions[at, by], start, accepting, vocabulary, states, limits)


def _without_dead_states(transitions: Int32Array, accepting: NDArray[np.bool_]) -> Int32Array:
    """Returns the transitions without those into states from which no accepting one can be reached."""
    sources, labels = np.nonzero(transitions >= 0)
    targets = transitions[sources, labels]
    order = np.argsort(targets, kind="stable")
    before = sources[order].astype(np.int32)
    row_offsets = np.searchsorted(targets[order], np.arange(len(accepting) + 1)).astype(np.int32)
    is_live = accepting.copy()
    frontier = np.flatnonzero(accepting).astype(np.int32)
    while len(frontier):
        reached = np.unique(before[expand_slices(row_offsets, frontier)[0]])
        frontier = reached[~is_live[reached]]
        is_live[frontier] = True
    return transitions if is_live.all() else np.where((transitions >= 0) & is_live[transitions], transitions, -1)


class _Walk:
    """Traverses a byte automaton and the token tries of its partitions together."""

    def __init__(
        self, step: ByteTransition, states: StatePartitions, vocabulary: Vocabulary, limits: WalkLimits
    ) -> None:
        self._step, self._states, self._vocabulary, self._limits = step, states, vocabulary, limits
        self.tries: dict[int, TokenTrie] = {}  # of the partitions met
        self._max_batch = int(min(MAX_PAIRS_PER_BATCH, limits.pairs))

    def explore(self, start: int) -> TokenEdges:
        """Returns the edges out of all states that tokens reach from `start`. Raises DfaTooLarge."""
        num_states = len(self._states.of_state)
        seen = np.zeros(num_states, np.bool_)
        seen[start] = True
        todo, num_edges, num_walked, num_pairs = np.array([start], np.int32), 0, 0, 0
        sizes: dict[int, int] = {}  # of the next batch with each partition
        parts: list[TokenEdges] = []
        while len(todo):
            partition = int(self._states.of_state[todo[0]])
            trie = self._trie(partition)
            size = sizes.get(partition) or max(1, self._max_batch // len(trie))
            is_alike = self._states.of_state[todo] == partition
            batch, todo = todo[is_alike][:size], np.concatenate((todo[~is_alike], todo[is_alike][size:]))
            part, pairs = self._expand(batch, trie)
            num_edges, num_walked, num_pairs = num_edges + len(part[0]), num_walked + len(batch), num_pairs + pairs
            parts.append(part)
            new_states = _distinct(part[2], num_states)
            new_states = new_states[~seen[new_states]]
            seen[new_states] = True
            todo = np.concatenate((todo, new_states))
            is_large = num_edges > EDGES_BEFORE_PROJECTION
            projected_edges = num_edges * (1 + len(todo) / num_walked) if is_large else num_edges
            if projected_edges > self._limits.edges or num_pairs > self._limits.pairs:
                raise DfaTooLarge
            sizes[partition] = max(1, min(4 * size, 4096, len(batch) * self._max_batch // (pairs + 1)))
        sources, nodes, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
        return sources, nodes, targets

    def _trie(self, partition: int) -> TokenTrie:
        if partition not in self.tries:
            self.tries[partition] = self._vocabulary.token_tries.get(self._states.partitions[partition])
        return self.tries[partition]

    def _expand(self, sources: Int32Array, trie: TokenTrie) -> tuple[TokenEdges, int]:
        """Returns the edges out of `sources`, and the number of (state, trie node) pairs visited."""
        origin = np.arange(len(sources), dtype=np.int32)  # the index in `sources` that each pair belongs to
        states, nodes = sources, np.zeros(len(sources), np.int32)
        parts: list[TokenEdges] = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))]
        pairs = 0
        while len(nodes):
            children, parents = expand_slices(trie.child_offsets, nodes)
            reached = self._step(states[parents], trie.byte[children])
            valid = np.flatnonzero(reached >= 0)
            origin, states, nodes = origin[parents[valid]], reached[valid], children[valid].astype(np.int32)
            ended = np.flatnonzero(trie.has_tokens[nodes])
            parts.append((sources[origin[ended]], nodes[ended], states[ended]))
            pairs += len(children)
        source, node, target = (np.concatenate(column) for column in zip(*parts, strict=True))
        return (source, node, target), pairs


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


def _to_csr(
    edges: TokenEdges,
    distance: Int32Array,
    accepting: NDArray[np.bool_],
    start: int,
    partitions: StatePartitions,
    width: int,
) -> TokenDfa:
    sources, nodes, targets = edges
    alive = distance != UNREACHABLE
    is_live_edge = alive[sources] & alive[targets]
    if not is_live_edge.all():
        sources, nodes, targets = sources[is_live_edge], nodes[is_live_edge], targets[is_live_edge]
    is_state = np.zeros(len(alive), np.bool_)
    for column in (start, sources, targets):
        is_state[column] = True
    states = np.flatnonzero(is_state).astype(np.int32)
    states = np.concatenate((np.array([start], np.int32), states[states != start]))
    number = np.zeros(len(alive), np.int32)
    number[states] = np.arange(len(states), dtype=np.int32)
    places = number[sources].astype(np.int64) * width + nodes
    sorted_places, next_states = _sort_by_place(places, number[targets], len(states) * width)
    row_offsets = np.searchsorted(sorted_places, np.arange(len(states) + 1) * width).astype(np.int32)
    nodes = (sorted_places % width).astype(np.int32)
    used, partition_of = np.unique(partitions.of_state[states], return_inverse=True)
    return TokenDfa(
        tuple(partitions.partitions[index] for index in used.tolist()),
        partition_of.astype(np.uint8),
        row_offsets,
        nodes,
        next_states,
        accepting[states],
        distance[states],
    )


def _sort_by_place(places: NDArray[np.int64], values: Int32Array, end: int) -> tuple[NDArray[np.int64], Int32Array]:
    """Sorts distinct `places`, which lie in [0, end), and their `values`."""
    if end > 8 * len(places) + 4096:
        order = np.argsort(places)
        return places[order], values[order]
    dense = np.full(end, -1, np.int32)  # faster than sorting
    dense[places] = values
    sorted_places = np.flatnonzero(dense >= 0)
    return sorted_places, dense[sorted_places]


# -- byte partitions ------------------------------------------------------------------------------
# Finds which bytes the states of a byte automaton cannot distinguish, so that tokens of such bytes are walked once.
#
# Two bytes are alike for a state if they lead to the same state from it and from every state that can be reached from
# it. In `Name: [a-z]{5,30}` all letters are alike from the first letter of the name on, but not before.

FEW_TOKENS = 16  # a state that at most 1/16 of the tokens may follow, by their first bytes, is walked byte by byte
MAX_LABELS = 200_000  # states times distinct columns of the transitions; 1 us each
MAX_CLASSES = 64  # with more, the tree of the tokens hardly shrinks
MAX_PARTITIONS = 6

Labels: TypeAlias = tuple[int, ...]


class StatePartitions(NamedTuple):
    """The partition `partitions[of_state[s]]` of each state s, as TokenTrie takes them; the first is SINGLE_BYTES."""

    partitions: tuple[bytes, ...]
    of_state: NDArray[np.uint8]


def single_bytes(num_states: int) -> StatePartitions:
    """Returns the partition in which all bytes differ, for all states."""
    return StatePartitions((SINGLE_BYTES,), np.zeros(num_states, np.uint8))


def state_partitions(transitions: Int32Array, num_tokens: Int32Array) -> StatePartitions:
    """Returns a partition for each state of a byte automaton: next states int32 [S, 256], -1 where there is none.

    `num_tokens` [256] says how many tokens begin with each byte. States that few tokens may follow get single bytes. At
    most MAX_PARTITIONS others are used; further states share one that distinguishes all that any state distinguishes.

    >>> transitions = np.full((2, 256), -1, np.int32)
    >>> transitions[:, ord("a") : ord("z") + 1] = 1
    >>> found = state_partitions(transitions, np.ones(256, np.int32))
    >>> found.of_state.tolist(), list(found.partitions[1][95:99])
    ([1, 1], [0, 0, 1, 1])
    """
    found = single_bytes(len(transitions))
    wide = np.flatnonzero((transitions >= 0) @ num_tokens > num_tokens.sum() // FEW_TOKENS).tolist()
    if not wide:
        return found
    column_of_byte, columns = _distinct_columns(transitions)
    if len(columns) * len(transitions) > MAX_LABELS:
        return found
    labels_of_state = _labels(columns)
    common = tuple(label + 1 for label in range(len(columns)))
    counts = Counter(labels_of_state[state] for state in wide)
    used = [labels for labels, _ in counts.most_common(MAX_PARTITIONS) if max(labels) < MAX_CLASSES]
    place = {labels: index + 1 for index, labels in enumerate(used)}
    rest = 0
    if len(counts) > MAX_PARTITIONS and len(columns) < MAX_CLASSES:
        used.append(common)
        rest = len(used)
    for state in wide:
        found.of_state[state] = place.get(labels_of_state[state], rest)
    encoded = [bytes(labels[column] for column in column_of_byte) for labels in used]
    return found._replace(partitions=(SINGLE_BYTES, *encoded))


def _distinct_columns(transitions: Int32Array) -> tuple[list[int], list[list[int]]]:
    """Returns the number of each byte's column, and the distinct columns."""
    by_byte = np.ascontiguousarray(transitions.T)
    number: dict[bytes, int] = {}
    column_of_byte = [number.setdefault(column.tobytes(), len(number)) for column in by_byte]
    firsts = [column_of_byte.index(column) for column in range(len(number))]
    return column_of_byte, by_byte[firsts].tolist()


def _labels(columns: list[list[int]]) -> list[Labels]:
    """Returns for each state the class of each column: DEAD_CLASS if it ends every text, equal ones if alike."""
    rows = list(zip(*columns, strict=True))
    labels: list[Labels] = [()] * len(rows)
    known: dict[Labels, Labels] = {}
    for component in _components([sorted(set(row) - {-1}) for row in rows]):
        members = set(component)
        after = {labels[to] for state in component for to in rows[state] if to >= 0 and to not in members}
        shared = _normalized(list(zip(*(rows[state] for state in component), *after, strict=True)), len(component))
        shared = known.setdefault(shared, shared)
        for state in component:
            labels[state] = shared
    return labels


def _normalized(keys: list[tuple[int, ...]], num_states: int) -> Labels:
    """Numbers distinct keys: first the next states of `num_states` states, then labels of other partitions."""
    number: dict[tuple[int, ...], int] = {}
    width = len(keys[0]) - num_states
    number[(-1,) * num_states + (DEAD_CLASS,) * width] = DEAD_CLASS
    return tuple(number.setdefault(key, len(number)) for key in keys)


def _components(successors: list[list[int]]) -> Iterator[list[int]]:
    """Yields the strongly connected components, each after those that it leads to (Tarjan 1972, without recursion)."""
    index, low = [0] * len(successors), [0] * len(successors)  # 0: not visited
    stack, is_on_stack, count = list[int](), [False] * len(successors), 0
    for root in range(len(successors)):
        if index[root]:
            continue
        todo = [(root, 0)]
        while todo:
            state, place = todo.pop()
            if not place:
                count += 1
                index[state] = low[state] = count
                stack.append(state)
                is_on_stack[state] = True
            elif is_on_stack[successors[state][place - 1]]:
                low[state] = min(low[state], low[successors[state][place - 1]])
            while place < len(successors[state]):
                to = successors[state][place]
                place += 1
                if not index[to]:
                    todo += ((state, place), (to, 0))
                    break
                if is_on_stack[to]:
                    low[state] = min(low[state], index[to])
            else:
                if low[state] == index[state]:
                    component = list[int]()
                    while not component or component[-1] != state:
                        component.append(stack.pop())
                        is_on_stack[component[-1]] = False
                    yield component
