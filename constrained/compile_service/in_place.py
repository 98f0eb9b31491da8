"""Compiles what is certainly small in the calling process, so that it waits for no worker: numbers, dates, few choices.

All work has a fixed bound, a few milliseconds. What exceeds it is left to a worker, which would give the same
automaton.
"""

from __future__ import annotations

import re

import numpy as np

from plait.constrained.dfa.choices import compile_choices
from plait.constrained.dfa.token_dfa import DfaTooLarge, TokenDfa, build_token_dfa
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.regex.small_dfa import build_small_dfa
from plait.constrained.specs import Choices, GrammarError, Regex, Spec
from plait.constrained.vocabulary import Vocabulary

MAX_CHOICES_BYTES = 512
MAX_PATTERN_CHARS = 256
MAX_WORK = 2000
MAX_FOLLOWING_BYTES = 24  # of a state; one that letters may follow has tens of thousands of tokens
MAX_EDGES = 50_000
_COSTLY_SYNTAX = re.compile(r"\\[a-zA-Z]|\(\?[^:]|\[\^|\{\d{3,}")  # named classes take tens of ms the first time


def compile_in_place(spec: Spec, vocabulary: Vocabulary) -> TokenDfa | None:
    """Returns the token automaton of a small spec; None for any other one, and for one that is refused.

    >>> compile_in_place(Choices(("yes", "no")), vocabulary)              # doctest: +SKIP
    """
    try:
        if not vocabulary.eos_ids:
            return None
        if isinstance(spec, Choices):
            is_small = sum(map(len, spec.choices)) <= MAX_CHOICES_BYTES
            return compile_choices(spec, vocabulary) if is_small else None
        if isinstance(spec, Regex):
            return _compile_regex(spec.pattern, vocabulary)
    except (GrammarError, DfaTooLarge, ValueError):
        pass  # a worker says why
    return None


def _compile_regex(pattern: str, vocabulary: Vocabulary) -> TokenDfa | None:
    if len(pattern) > MAX_PATTERN_CHARS or _COSTLY_SYNTAX.search(pattern):
        return None
    transitions, start, accepting = build_small_dfa(to_plain_pattern(pattern).pattern, MAX_WORK)
    if int((transitions >= 0).sum(axis=1, dtype=np.int64).max()) > MAX_FOLLOWING_BYTES:
        return None
    return build_token_dfa(lambda at, by: transitions[at, by], start, accepting, vocabulary.trie, MAX_EDGES)
