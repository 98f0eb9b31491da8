"""Patterns of Python's `re` with lookaround, anchors and word boundaries, as byte automata."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from plait.constrained.dfa.token_dfa import DfaTooLarge
from plait.constrained.regex.char_classes import Ranges
from plait.constrained.regex.lookaround_automaton import lookaround_table
from plait.constrained.regex.python_syntax import check_regex, parse_regex
from plait.constrained.regex.utf8_rows import NO_BYTE, utf8_rows
from plait.constrained.specs import GrammarError
from plait.constrained.tokens.byte_trie import Int32Array

MAX_BYTE_STATES = 20_000
_ASCII = 128


def build_lookaround_dfa(pattern: str) -> tuple[Int32Array, int, NDArray[np.bool_]]:
    """Returns the UTF-8 byte automaton of what `re.fullmatch` matches: next states [S, 256] (-1: none), start,
    accepting [S].

    Raises GrammarError for what cannot be written as an automaton of 1,000 states over characters, and DfaTooLarge
    beyond 20,000 states over bytes.

    >>> states, start, accepting = build_lookaround_dfa("(?=a)[ab]")
    >>> bool(accepting[states[start, ord("a")]]), int(states[start, ord("c")]) >= 0
    (True, False)
    """
    tree = parse_regex(pattern)
    check_regex(pattern)
    whole = [("AT", "AT_BEGINNING_STRING"), ("SUBPATTERN", (None, 0, 0, list(tree))), ("AT", "AT_END_STRING")]
    table, finals, classes = lookaround_table(whole, pattern, tree.state.flags)
    if r"\B" in pattern and (0 in finals) is (re.fullmatch(pattern, "") is None):
        raise GrammarError(r"\B does not match the empty text in Python before 3.14, on which this pattern depends")
    dead = {state for state, row in enumerate(table) if state not in finals and set(row) == {state}}
    return _BytesOfClasses(classes).dfa([[NO_BYTE if to in dead else to for to in row] for row in table], finals)


class _BytesOfClasses:
    """The spelling in UTF-8 of disjoint classes of characters."""

    def __init__(self, classes: list[Ranges]) -> None:
        self._of_ascii = np.full(_ASCII, -1, np.int32)  # the class of each ASCII character
        beyond: list[Ranges] = []
        for place, ranges in enumerate(classes):
            for low, high in ranges:
                self._of_ascii[low : max(low, min(high + 1, _ASCII))] = place
            beyond.append(tuple((max(low, _ASCII), high) for low, high in ranges if high >= _ASCII))
        self._rows = utf8_rows(beyond)
        self._below: dict[int, list[int]] = {}  # a row of them -> the classes that it leads to

    def dfa(self, table: list[list[int]], finals: set[int]) -> tuple[Int32Array, int, NDArray[np.bool_]]:
        """Returns the byte automaton of an automaton over the classes; the states of `table` come first."""
        self._states = [np.full(256, NO_BYTE, np.int32) for _ in table]
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        targets = np.asarray(table, np.int32)
        for state, row in enumerate(targets):
            self._states[state][:_ASCII] = row[self._of_ascii]
            self._states[state][_ASCII:] = self._targets(0, row)[_ASCII:]
        accepting = np.zeros(len(self._states), np.bool_)
        accepting[list(finals)] = True
        return np.stack(self._states), 0, accepting

    def _targets(self, place: int, row: Int32Array) -> Int32Array:
        """Returns the states that the bytes of a row of `utf8_rows` lead to, where the classes lead to `row`."""
        encoded = self._rows[place]
        found = np.where(encoded <= -2, row[np.maximum(-2 - encoded, 0)], NO_BYTE).astype(np.int32)
        for byte in np.flatnonzero(encoded > 0):
            found[byte] = self._inner_state(int(encoded[byte]), row)
        return found

    def _inner_state(self, place: int, row: Int32Array) -> int:
        """Returns the state within a character; it is the same for all states with the same targets."""
        key = (place, tuple(row[self._classes_below(place)].tolist()))
        if set(key[1]) == {NO_BYTE}:
            return NO_BYTE
        if key not in self._known:
            targets = self._targets(place, row)
            if len(self._states) >= MAX_BYTE_STATES:
                raise DfaTooLarge
            self._known[key] = len(self._states)
            self._states.append(targets)
        return self._known[key]

    def _classes_below(self, place: int) -> list[int]:
        if place not in self._below:
            entries = set(self._rows[place].tolist())
            found = {-2 - entry for entry in entries if entry <= -2}
            found.update(*(self._classes_below(entry) for entry in entries if entry > 0))
            self._below[place] = sorted(found)
        return self._below[place]
