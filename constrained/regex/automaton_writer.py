"""Writes an automaton over characters as a plain pattern, by removing its states one after another."""

from __future__ import annotations

from collections.abc import Collection

from plait.constrained.regex.char_classes import Ranges, write_class
from plait.constrained.specs import GrammarError

MAX_STATES = 120
MAX_WRITTEN = 40_000
NO_TEXT = write_class(())
TOO_LARGE = "its pattern is too large to be combined with another one"


def write_automaton(initial: int, finals: Collection[int], transitions: dict[int, dict[int, Ranges]]) -> str:
    """Returns the pattern of an automaton, by removing states: each path through one becomes an edge.

    Raises GrammarError if it is too large. `transitions`: for each state, the characters that lead to another one.

    >>> write_automaton(0, {1}, {0: {1: ((97, 97),)}, 1: {}})
    '[\\\\U00000061]'
    """
    live = _live_states(finals, transitions)
    if initial not in live:
        return NO_TEXT
    if len(live) > MAX_STATES:
        raise GrammarError(TOO_LARGE)
    edges: dict[int, dict[int, str]] = {-1: {initial: ""}, -2: {}}
    for state in live:
        found = transitions.get(state, {})
        edges[state] = {target: write_class(ranges) for target, ranges in found.items() if target in live}
        if state in finals:
            edges[state][-2] = ""
    sources: dict[int, set[int]] = {state: set() for state in edges}
    for source, targets in edges.items():
        for target in targets:
            sources[target].add(source)
    for _ in range(len(live)):
        state = min(live, key=lambda s: (len(edges[s]) * len(sources[s]), s))
        live.remove(state)
        _remove_state(state, edges, sources)
    return edges[-1].get(-2, NO_TEXT)


def minimized(table: list[list[int]], finals: set[int]) -> tuple[list[list[int]], set[int]]:
    """Merges the equivalent states of a DFA (Moore 1956). State 0 stays the first one.

    table: for each state, the target of each class. finals: the accepting states.

    >>> minimized([[1], [2], [2]], {1, 2})
    ([[1], [1]], {1})
    """
    group = [int(state in finals) for state in range(len(table))]
    while True:
        keys = [(group[state], *(group[target] for target in row)) for state, row in enumerate(table)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) == len(set(group)):
            break
        group = [numbers[key] for key in keys]
    order = {number: place for place, number in enumerate(dict.fromkeys(group))}
    merged = {order[group[state]]: [order[group[target]] for target in row] for state, row in enumerate(table)}
    return [merged[place] for place in range(len(merged))], {order[group[state]] for state in finals}


def _live_states(finals: Collection[int], transitions: dict[int, dict[int, Ranges]]) -> set[int]:
    """Returns the states from which a final one is reached."""
    before: dict[int, list[int]] = {}
    for source, targets in transitions.items():
        for target in targets:
            before.setdefault(target, []).append(source)
    live, todo = set(finals), list(finals)
    while todo:
        for source in before.get(todo.pop(), ()):
            if source not in live:
                live.add(source)
                todo.append(source)
    return live


def _remove_state(state: int, edges: dict[int, dict[int, str]], sources: dict[int, set[int]]) -> None:
    outgoing = edges.pop(state)
    loop = outgoing.pop(state, None)
    around = f"(?:{loop}){{0,}}" if loop is not None else ""
    for source in sources.pop(state) - {state}:
        incoming = edges[source].pop(state)
        for target, out in outgoing.items():
            path = f"{_grouped(incoming)}{around}{_grouped(out)}"
            known = edges[source].get(target)
            edges[source][target] = path if known is None else _either(known, path)
            sources[target].add(source)
            if len(edges[source][target]) > MAX_WRITTEN:
                raise GrammarError(TOO_LARGE)
    for target in outgoing:
        sources[target].discard(state)


def _either(one: str, other: str) -> str:
    if not one or not other:
        return f"(?:{one or other}){{0,1}}"
    return f"(?:{one}|{other})"


def _grouped(pattern: str) -> str:
    return f"(?:{pattern})" if "|" in pattern else pattern
