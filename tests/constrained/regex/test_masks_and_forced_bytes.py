"""Masks and forced bytes of regex grammars, compared with automata of interegular."""

from __future__ import annotations

import random

import interegular
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matchers import compile_in_process, token_mask

from plait.constrained import Regex, Vocabulary
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, regex_source
from plait.constrained.regex.python_syntax import to_plain_pattern


class Oracle:
    """Allowed tokens and forced text after an ASCII text, by interegular's automaton."""

    def __init__(self, pattern: str) -> None:
        self._fsm = interegular.parse_pattern(pattern).to_fsm()

    def state(self, text: str) -> int | None:
        state = self._fsm.initial
        for character in text:
            symbol = self._fsm.alphabet[character]
            if state is None or symbol not in self._fsm.map.get(state, {}):
                return None
            state = self._fsm.map[state][symbol]
        return state if self._fsm.islive(state) else None

    def allowed(self, text: str, vocabulary: Vocabulary) -> np.ndarray:
        bits = np.zeros(len(vocabulary), bool)
        for token, piece in enumerate(vocabulary.token_bytes):
            if token in vocabulary.eos_ids:
                bits[token] = self.state(text) in self._fsm.finals
            elif piece and piece.isascii():
                bits[token] = self.state(text + piece.decode()) is not None
        return bits

    def forced(self, text: str) -> str:
        forced = ""
        while self.state(text + forced) not in self._fsm.finals:
            candidates = [c for c in map(chr, range(128)) if self.state(text + forced + c) is not None]
            if len(candidates) != 1:
                break
            forced += candidates[0]
        return forced


ascii_pieces = st.sampled_from(["a", "b", "1", r"\.", "[ab]", "[a1]", "yes", "ab"])

ascii_patterns = st.recursive(
    ascii_pieces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda arms: f"({'|'.join(arms)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(pattern=ascii_patterns, seed=st.integers(0, 1000))
def test_masks_and_forced_bytes_equal_those_of_interegular(small: Vocabulary, pattern: str, seed: int) -> None:
    rng, oracle = random.Random(seed), Oracle(pattern)
    dfa = compile_in_process(Regex(pattern), small).matcher()
    lazy = LlguidanceGrammar(regex_source(to_plain_pattern(pattern).pattern, small), small).matcher()
    text = ""
    for _ in range(6):
        expected = oracle.allowed(text, small)
        assert (token_mask(dfa, small) == expected).all(), text
        forced = oracle.forced(text).encode()
        assert dfa.forced_bytes() == forced, text
        assert lazy.forced_bytes() == forced, text
        lazy_mask = token_mask(lazy, small)
        assert lazy_mask.any()
        assert not (lazy_mask & ~expected).any(), text
        assert forced or (lazy_mask == expected).all(), text
        next_tokens = [int(i) for i in np.flatnonzero(expected) if i not in small.eos_ids]
        if not next_tokens:
            break
        token = rng.choice(next_tokens)
        assert dfa.accept(token)
        assert lazy.accept(token)
        text += small.token_bytes[token].decode()


@pytest.mark.parametrize("pattern", [r"[0-9]+(\.[0-9]+)?", "hello world(, hello)*", r"(yes|no|yes please) [a-z]+"])
def test_masks_over_a_real_vocabulary_equal_those_of_interegular(smollm: Vocabulary, pattern: str) -> None:
    oracle, matcher, rng, text = (
        Oracle(pattern),
        compile_in_process(Regex(pattern), smollm).matcher(),
        random.Random(1),
        "",
    )
    for _ in range(3):
        expected = oracle.allowed(text, smollm)
        assert (token_mask(matcher, smollm) == expected).all(), text
        assert matcher.forced_bytes() == oracle.forced(text).encode()
        token = rng.choice([int(i) for i in np.flatnonzero(expected) if i not in smollm.eos_ids])
        assert matcher.accept(token)
        text += smollm.token_bytes[token].decode()
