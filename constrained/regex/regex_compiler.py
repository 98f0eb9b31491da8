"""Compiles a Regex: to a byte automaton, by outlines-core unless it is small, or to a grammar for llguidance if that is
too large.

outlines-core (0.2.11 to 0.2.14) has two faults: it drops each transition from a final to a non-final state, and it
takes only the leftmost alternative of `|` that matches. With an end mark appended, which no text can contain, no
earlier state is final, and neither fault occurs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import outlines_core
from numpy.typing import NDArray

from plait.constrained.dfa.token_dfa import DfaTooLarge, TokenDfa, build_table_dfa
from plait.constrained.guidance.llguidance_grammar import LlguidanceSource, regex_source
from plait.constrained.regex.lookaround_automaton import TOO_MANY_STATES
from plait.constrained.regex.lookaround_dfa import build_lookaround_dfa
from plait.constrained.regex.python_syntax import ASSERTION_REASONS, PlainPattern, to_plain_pattern
from plait.constrained.regex.small_dfa import build_small_dfa
from plait.constrained.specs import GrammarError, Regex
from plait.constrained.tokens.byte_trie import Int32Array
from plait.constrained.tokens.vocabulary import Vocabulary

ByteDfa: TypeAlias = tuple[Int32Array, int, NDArray[np.bool_]]
ByteDfaBuilder: TypeAlias = Callable[[str], ByteDfa]
MAX_WEIGHT = 2000  # beyond it outlines-core takes a second for some patterns
MAX_LENGTH = 100_000  # in characters; beyond it llguidance reaches its limits within a few dozen tokens
MAX_BYTE_STATES = 20_000
_END_MARK = "\U0010ffff"  # no pattern names it, and the classes that have it are written without it
_TO_LAST = re.compile(r"(?<!\[\^\\U00000000)-\\U0010ffff")
_END_ID, _NO_ID = 256, 257


def compile_regex(
    spec: Regex, vocabulary: Vocabulary, states: ByteDfaBuilder | None = None
) -> TokenDfa | LlguidanceSource:
    """Returns the token automaton of a pattern, or a grammar for llguidance if the automaton would be too large.

    Raises GrammarError for patterns that are invalid, unsupported, or match nothing that the vocabulary can spell. It
    may take seconds and gigabytes, and may abort the process: call it in a worker process.

    >>> compile_regex(Regex("[0-9]+"), vocabulary)                        # doctest: +SKIP
    """
    try:
        plain = to_plain_pattern(spec.pattern)
    except GrammarError as error:
        if error.reason not in ASSERTION_REASONS:
            raise
        return _compile_assertions(spec.pattern, vocabulary, error.where)
    return compile_plain_pattern(plain, vocabulary, states)


def _compile_assertions(pattern: str, vocabulary: Vocabulary, where: int | str | None) -> TokenDfa:
    """Returns the token automaton of a pattern with lookaround, anchors or word boundaries; the first is at `where`."""
    try:
        table = build_table_dfa(*build_lookaround_dfa(pattern), vocabulary)
    except DfaTooLarge:
        raise GrammarError(TOO_MANY_STATES, where) from None
    except RecursionError:
        raise GrammarError("the pattern is nested too deeply", where) from None
    except GrammarError as error:
        raise GrammarError(error.reason, where if error.where is None else error.where) from None
    return _expect_table(table)


def compile_plain_pattern(
    plain: PlainPattern, vocabulary: Vocabulary, states: ByteDfaBuilder | None = None
) -> TokenDfa | LlguidanceSource:
    """Compiles a plain pattern like `compile_regex`. `states` builds the byte automaton in place of build_byte_dfa.

    If it raises DfaTooLarge, the pattern becomes a grammar for llguidance.

    >>> compile_plain_pattern(PlainPattern("a{3}", 3, 3), vocabulary)     # doctest: +SKIP
    """
    if plain.length > MAX_LENGTH:
        raise GrammarError("the pattern is too large once its repeats are expanded")
    if plain.weight > MAX_WEIGHT:
        return regex_source(plain.pattern, vocabulary)
    try:
        transitions, start, accepting = _small_dfa(plain) or (states or build_byte_dfa)(plain.pattern)
        table = build_table_dfa(transitions, start, accepting, vocabulary)
    except (DfaTooLarge, ValueError):
        return regex_source(plain.pattern, vocabulary)
    return _expect_table(table)


def _expect_table(table: TokenDfa | None) -> TokenDfa:
    if table is None:
        raise GrammarError("no text of this constraint can be written in tokens of the vocabulary")
    return table


def _small_dfa(plain: PlainPattern) -> ByteDfa | None:
    try:
        return build_small_dfa(plain.pattern)
    except DfaTooLarge:
        return None


def build_byte_dfa(plain: str) -> ByteDfa:
    """Returns the UTF-8 byte automaton of a plain pattern: next states [S, 256] (-1: none), start, accepting [S].

    Raises ValueError if outlines-core refuses the pattern and DfaTooLarge beyond 20,000 states. Dead states are kept.

    >>> states, start, accepting = build_byte_dfa("ab|a")
    >>> bool(accepting[states[start, ord("a")]])
    True
    """
    without_mark = _TO_LAST.sub(r"-\\U0010fffe", plain)
    index = outlines_core.Index(f"(?:{without_mark}){_END_MARK}", _byte_vocabulary())
    edges: dict[int, dict[int, int]] = index.get_transitions()
    if len(edges) > MAX_BYTE_STATES:
        raise DfaTooLarge
    start: int = index.get_initial_state()
    number = {state: at for at, state in enumerate({start: None} | dict.fromkeys(edges))}
    ends = set(index.get_final_states())  # after the end mark; no text reaches them
    states = np.full((len(number), 256), -1, np.int32)
    accepting = np.zeros(len(number), np.bool_)
    for state, row in edges.items():
        at = number[state]
        accepting[at] = row.get(_END_ID) in ends
        edges_out = [(byte, number[to]) for byte, to in row.items() if byte < 256 and to in number]
        if edges_out:
            states[at, [byte for byte, _ in edges_out]] = [to for _, to in edges_out]
    return states, 0, accepting


@cache
def _byte_vocabulary() -> outlines_core.Vocabulary:
    """Returns a vocabulary of the 256 bytes and the end mark. The library's own end id is outside and never used."""
    tokens = {bytes([byte]): [byte] for byte in range(256)} | {_END_MARK.encode(): [_END_ID]}
    return outlines_core.Vocabulary(_NO_ID, tokens)
