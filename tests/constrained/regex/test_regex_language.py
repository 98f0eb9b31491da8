"""Regex masks accept the texts that `re.fullmatch` matches, for any tokenization."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matchers import compile_in_process, token_mask
from regex_oracles import PATTERNS, REAL, compare_with_oracles

from plait.constrained import Grammar, GrammarError, Regex, Vocabulary, mask_words
from plait.constrained.dfa.dfa_grammar import DfaGrammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, regex_source
from plait.constrained.regex.python_syntax import to_plain_pattern
from plait.constrained.regex.regex_compiler import MAX_WEIGHT


@cache
def ids_of_tokens(vocabulary: Vocabulary) -> dict[bytes, list[int]]:
    """The ids of all tokens with the same bytes, without EOS."""
    ids: dict[bytes, list[int]] = {}
    for token, piece in enumerate(vocabulary.token_bytes):
        if piece and token not in vocabulary.eos_ids:
            ids.setdefault(piece, []).append(token)
    return ids


def random_tokens(text: bytes, vocabulary: Vocabulary, rng: random.Random) -> list[int] | None:
    """Randomly chosen tokens that join to `text`, or None if no tokens do."""
    ids, dead = ids_of_tokens(vocabulary), set[int]()

    def rest(at: int) -> list[int] | None:
        if at == len(text):
            return []
        pieces = [text[at:end] for end in range(at + 1, len(text) + 1)]
        fitting = sorted((token, piece) for piece in pieces for token in ids.get(piece, ()))
        rng.shuffle(fitting)
        for token, piece in fitting:
            if at + len(piece) not in dead and (tail := rest(at + len(piece))) is not None:
                return [token, *tail]
        dead.add(at)
        return None

    return rest(0)


def accepts(grammar: Grammar, tokens: list[int], vocabulary: Vocabulary) -> bool:
    """Whether mask and `accept` allow every token, and EOS after them; asserts that both agree."""
    matcher, row = grammar.matcher(), np.zeros(mask_words(len(vocabulary)), np.int32)
    for token in tokens:
        matcher.fill_mask(row)
        allowed = bool(row[token // 32] >> (token % 32) & 1)
        assert matcher.accept(token) is allowed
        if not allowed:
            return False
    ends = token_mask(matcher, vocabulary)[list(vocabulary.eos_ids)]
    assert ends.all() == ends.any() == matcher.is_accepting
    return matcher.is_accepting


def samples(pattern: str, examples: str, rng: random.Random) -> list[str]:
    """The examples, and texts with one or two random changes."""
    texts = [re.sub("\u0020", " ", text) for text in examples.split(" ")] + [""]
    for text in [*texts]:
        for _ in range(8):
            at, letter = rng.randrange(len(text) + 1), rng.choice([*text, *"a1. -é日\n"])
            texts.append(text[:at] + rng.choice(["", letter]) + text[at + rng.randrange(2) :])
    return texts


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(("pattern", "examples"), REAL, ids=[pattern for pattern, _ in REAL])
def test_real_patterns_accept_what_re_matches(small: Vocabulary, pattern: str, examples: str) -> None:
    grammar, rng = compile_in_process(Regex(pattern), small), random.Random(pattern)
    for text in samples(pattern, examples, rng):
        tokens = random_tokens(text.encode(), small, rng)
        if tokens is not None:
            assert accepts(grammar, tokens, small) is bool(re.fullmatch(pattern, text)), text


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(("pattern", "examples"), REAL[::3], ids=[pattern for pattern, _ in REAL[::3]])
def test_real_patterns_accept_what_re_matches_with_a_real_tokenizer(
    smollm: Vocabulary, pattern: str, examples: str
) -> None:
    grammar, rng = compile_in_process(Regex(pattern), smollm), random.Random(pattern)
    eos_id = smollm.eos_ids[0]
    for text in samples(pattern, examples, rng):
        matcher = grammar.matcher()
        is_accepted = all(matcher.accept(token) for token in smollm.encode(text))
        assert (is_accepted and matcher.accept(eos_id)) is bool(re.fullmatch(pattern, text)), text


pieces = st.sampled_from(["a", "b", "1", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "[a1]", "é", "ab"])
patterns = st.recursive(
    pieces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda arms: f"({'|'.join(arms)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "??"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=7,
)
SHORT_TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product("ab1.", repeat=n)]
SHORT_TEXTS += ["é", "aé", "日", "ab1.ab1."]


@settings(max_examples=300, deadline=None)
@given(pattern=patterns, seed=st.integers(0, 1000))
def test_random_patterns_accept_the_short_texts_that_re_matches(small: Vocabulary, pattern: str, seed: int) -> None:
    assume(to_plain_pattern(pattern).weight <= MAX_WEIGHT)  # a larger pattern has no automaton
    rng = random.Random(seed)
    dfa = compile_in_process(Regex(pattern), small)
    assert isinstance(dfa, DfaGrammar)
    lazy = LlguidanceGrammar(regex_source(to_plain_pattern(pattern).pattern, small), small)
    for text in rng.sample(SHORT_TEXTS, 60):
        tokens = random_tokens(text.encode(), small, rng)
        assert tokens is not None
        expected = bool(re.fullmatch(pattern, text))
        assert accepts(dfa, tokens, small) is expected, text
        matcher = lazy.matcher()
        assert (all(map(matcher.accept, tokens)) and matcher.is_accepting) is expected, text


def test_a_large_pattern_is_matched_lazily(smollm: Vocabulary) -> None:
    grammar = compile_in_process(Regex(r"(\w+ ?){1,200}"), smollm)
    assert isinstance(grammar, LlguidanceGrammar)
    assert accepts(grammar, list(smollm.encode("hello wide world 12")), smollm)
    assert not accepts(grammar, list(smollm.encode("hello, world")), smollm)


def test_patterns_without_a_spellable_text_raise_and_dead_ends_are_masked(small: Vocabulary) -> None:
    for pattern in ("~", r"[^\s\S]", "a~+"):
        with pytest.raises(GrammarError, match="no text of this constraint can be written"):
            compile_in_process(Regex(pattern), small)
    matcher = compile_in_process(Regex("a(~|b)|1~"), small).matcher()
    assert matcher.forced_bytes() == b"ab"
    assert not matcher.accept(small.token_bytes.index(b"1"))


def test_the_table_has_200_different_patterns() -> None:
    assert len(PATTERNS) >= 200
    assert len(set(PATTERNS)) == len(PATTERNS)


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("tenth", range(10))
def test_200_patterns_agree_with_two_oracles(tenth: int) -> None:
    for at in range(tenth, len(PATTERNS), 10):
        comparison = compare_with_oracles(PATTERNS[at], seed=at, num_texts=60)
        assert not comparison.mismatches, (PATTERNS[at], comparison.mismatches[:3])
        assert comparison.num_texts >= 50
