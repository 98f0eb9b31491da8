"""Intersections and complements of plain patterns, written as plain patterns again: by automata (interegular).

The automaton is turned into a pattern by removing its states one after another; both sizes are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from plait.constrained.regex.char_classes import Ranges, merge_ranges, write_class
from plait.constrained.regex.python_syntax import PlainPattern
from plait.constrained.specs import GrammarError

MAX_OPERAND = 8_000  # characters of both patterns
MAX_STATES = 120
MAX_WRITTEN = 30_000
MAX_PAIRS = 20_000
NO_TEXT = write_class(())
TOO_LARGE = "its pattern is too large to be combined with another one"
_CLASS = re.compile(r"\[(\^?)((?:\\U[0-9a-f]{8}(?:-\\U[0-9a-f]{8})?)+)\]|\\U([0-9a-f]{8})")
_RANGE = re.compile(r"\\U([0-9a-f]{8})(?:-\\U([0-9a-f]{8}))?")


@lru_cache(maxsize=256)
def intersect(one: str, other: str, *, negated: bool = False) -> PlainPattern:
    """Returns a plain pattern of the texts that match `one` and `other`; with `negated`, `one` and not `other`.

    Raises GrammarError if an automaton or the result is too large.

    >>> intersect("a|b", "b|c").pattern
    '[\\\\U00000062]'
    """
    import interegular

    if len(one) + len(other) > MAX_OPERAND:
        raise GrammarError(TOO_LARGE)
    try:
        a, b = (interegular.parse_pattern(for_interegular(pattern)).to_fsm() for pattern in (one, other))
        if len(a.states) * len(b.states) > MAX_PAIRS:
            raise GrammarError(TOO_LARGE)
        automaton = ((a - b) if negated else (a & b)).reduce()
    except (ValueError, RecursionError, OverflowError, interegular.Unsupported, interegular.InvalidSyntax) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError("its pattern cannot be combined with another one") from None
    if len(automaton.states) > MAX_STATES:
        raise GrammarError(TOO_LARGE)
    written = _write(automaton)
    return PlainPattern(written, len(written), float(len(_CLASS.findall(written))))


def _write(automaton: Any) -> str:
    """Returns the pattern of an automaton of interegular."""
    classes = _classes(automaton)
    edges: dict[int, dict[int, Ranges]] = {}
    for state in automaton.states:
        symbols: dict[int, list[tuple[int, int]]] = {}
        for key, target in automaton.map.get(state, {}).items():
            symbols.setdefault(target, []).extend(classes[key])
        edges[state] = {target: merge_ranges(found, False) for target, found in symbols.items()}
    return write_automaton(automaton.initial, automaton.finals, edges)


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


def _classes(automaton: Any) -> dict[int, list[tuple[int, int]]]:
    """Returns the characters of each transition of the automaton's alphabet."""
    import interegular.fsm as fsm

    found: dict[int, list[tuple[int, int]]] = {}
    named = [
        (ord(symbol), ord(symbol))
        for symbols in automaton.alphabet.by_transition.values()
        for symbol in symbols
        if symbol is not fsm.anything_else
    ]
    for key, symbols in automaton.alphabet.by_transition.items():
        found[key] = [(ord(symbol), ord(symbol)) for symbol in symbols if symbol is not fsm.anything_else]
        if fsm.anything_else in symbols:
            found[key] += merge_ranges(named, negated=True)
    return found


def for_interegular(plain: str) -> str:
    """Returns a plain pattern for interegular, which expands ranges: large classes are written as complements."""

    def rewrite_class(found: re.Match[str]) -> str:
        if found[3]:
            return re.escape(chr(int(found[3], 16)))
        spans = [(int(a, 16), int(b or a, 16)) for a, b in _RANGE.findall(found[2])]
        ranges = merge_ranges(spans, bool(found[1]))
        gaps = merge_ranges(spans, not found[1])
        if sum(high - low for low, high in ranges) < 2000:
            return _listed("[", ranges) if ranges else r"[^\s\S]"
        return _listed("[^", gaps) if gaps else r"(?:.|\n)"

    return _CLASS.sub(rewrite_class, plain)


def _listed(opened: str, ranges: tuple[tuple[int, int], ...]) -> str:
    def char(code: int) -> str:
        return "\\" + chr(code) if chr(code) in r"\]^-[" else chr(code)

    return opened + "".join(char(a) if a == b else f"{char(a)}-{char(b)}" for a, b in ranges) + "]"
