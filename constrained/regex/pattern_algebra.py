"""Intersections and complements of plain patterns, written as plain patterns again: by automata (interegular)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from plait.constrained.regex.automaton_writer import MAX_STATES, TOO_LARGE, write_automaton
from plait.constrained.regex.char_classes import Ranges, merge_ranges
from plait.constrained.regex.lookaround_automaton import with_lookaround
from plait.constrained.regex.python_syntax import PlainPattern, parse_regex
from plait.constrained.specs import GrammarError

MAX_OPERAND = 8_000  # characters of both patterns
MAX_PAIRS = 20_000
MAX_UNBOUNDED = 1_000  # characters of a pattern whose automaton is built without a bound on the work, a fast way
_CLASS = re.compile(r"\[(\^?)((?:\\U[0-9a-f]{8}(?:-\\U[0-9a-f]{8})?)+)\]|\\U([0-9a-f]{8})")
_RANGE = re.compile(r"\\U([0-9a-f]{8})(?:-\\U([0-9a-f]{8}))?")


def intersect(one: str, other: str, *, negated: bool = False) -> PlainPattern:
    """Returns a plain pattern of the texts that match `one` and `other`; with `negated`, `one` and not `other`.

    Raises GrammarError if an automaton or the result is too large.

    >>> intersect("a|b", "b|c").pattern
    '[\\\\U00000062]'
    """
    found = _intersected(one, other, negated)
    if isinstance(found, str):
        raise GrammarError(found)
    return found


@lru_cache(maxsize=256)
def _intersected(one: str, other: str, negated: bool) -> PlainPattern | str:
    """Returns what `intersect` does, or the reason of its refusal, which may take a second to find."""
    if len(one) + len(other) > MAX_OPERAND:
        return TOO_LARGE
    try:
        if max(len(one), len(other)) > MAX_UNBOUNDED:
            return _bounded(one, other, negated)
        written = _write(_automaton_of_both(one, other, negated))
    except GrammarError as error:
        return error.reason
    return PlainPattern(written, len(written), float(len(_CLASS.findall(written))))


def _bounded(one: str, other: str, negated: bool) -> PlainPattern:
    """Returns what `intersect` does by lookahead: interegular would build the automata without a bound on its work."""
    source = rf"^(?{'!' if negated else '='}(?:{other})\Z)(?:{one})\Z"
    return with_lookaround(list(parse_regex(source)), source)


def _automaton_of_both(one: str, other: str, negated: bool) -> Any:
    import interegular

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
    return automaton


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
