"""Finds which bytes the states of a byte automaton cannot distinguish, so that tokens of such bytes are walked once.

Two bytes are alike for a state if they lead to the same state from it and from every state that can be reached from it.
In `Name: [a-z]{5,30}` all letters are alike from the first letter of the name on, but not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.constrained.tokens.byte_trie import Int32Array
from plait.constrained.tokens.token_trie import DEAD_CLASS, SINGLE_BYTES

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
