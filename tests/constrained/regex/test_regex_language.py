"""The language that the masks let through is the language of `re.fullmatch`, whatever the tokenization."""

from __future__ import annotations

import itertools
import random
import re

import interegular
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from regex_oracles import PATTERNS, REAL, compare_with_oracles

from plait.constrained import Grammar, GrammarError, Matcher, Regex, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.dfa.dfa_grammar import DfaGrammar
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, regex_source
from plait.constrained.regex.compiler import MAX_WEIGHT
from plait.constrained.regex.python_syntax import to_plain_pattern


def in_process(pattern: str, vocabulary: Vocabulary) -> Grammar:
    return build_grammar(compile_spec(Regex(pattern), vocabulary), vocabulary)


def spelled(text: bytes, vocabulary: Vocabulary, rng: random.Random) -> list[int] | None:
    """Some tokens that join to `text`, chosen at random; None where there are none."""
    ways = [(i, t) for i, t in enumerate(vocabulary.token_bytes) if t and i not in vocabulary.eos_ids and t in text]
    dead = set[int]()

    def rest(at: int) -> list[int] | None:
        if at == len(text):
            return []
        fitting = [way for way in ways if text.startswith(way[1], at)]
        rng.shuffle(fitting)
        for token, piece in fitting:
            if at + len(piece) not in dead and (found := rest(at + len(piece))) is not None:
                return [token, *found]
        dead.add(at)
        return None

    return rest(0)


def accepts(grammar: Grammar, tokens: list[int], vocabulary: Vocabulary) -> bool:
    """Whether the tokens pass, each both by mask and by accept, and the text may then end."""
    matcher, row = grammar.matcher(), np.zeros(mask_words(len(vocabulary)), np.int32)
    for token in tokens:
        matcher.fill_mask(row)
        allowed = bool(row[token // 32] >> (token % 32) & 1)
        assert matcher.accept(token) is allowed
        if not allowed:
            return False
    ends = mask_of(matcher, len(vocabulary))[list(vocabulary.eos_ids)]
    assert ends.all() == ends.any() == matcher.is_accepting
    return matcher.is_accepting


def mask_of(matcher: Matcher, width: int) -> np.ndarray:
    row = np.full(mask_words(width), -1, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[width:].any()
    return bits[:width]


def samples(pattern: str, examples: str, rng: random.Random) -> list[str]:
    """The examples, and texts a change or two away from them."""
    texts = [re.sub("\u0020", " ", text) for text in examples.split(" ")] + [""]
    for text in [*texts]:
        for _ in range(8):
            at, letter = rng.randrange(len(text) + 1), rng.choice([*text, *"a1. -é日\n"])
            texts.append(text[:at] + rng.choice(["", letter]) + text[at + rng.randrange(2) :])
    return texts


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(("pattern", "examples"), REAL, ids=[pattern for pattern, _ in REAL])
def test_real_patterns_mean_what_re_means(small: Vocabulary, pattern: str, examples: str) -> None:
    grammar, rng = in_process(pattern, small), random.Random(pattern)
    for text in samples(pattern, examples, rng):
        tokens = spelled(text.encode(), small, rng)
        if tokens is not None:
            assert accepts(grammar, tokens, small) is bool(re.fullmatch(pattern, text)), text


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(("pattern", "examples"), REAL[::3], ids=[pattern for pattern, _ in REAL[::3]])
def test_real_patterns_on_a_real_vocabulary(smollm: Vocabulary, pattern: str, examples: str) -> None:
    grammar, rng = in_process(pattern, smollm), random.Random(pattern)
    first_end = smollm.eos_ids[0]
    for text in samples(pattern, examples, rng):
        matcher = grammar.matcher()
        passed = all(matcher.accept(token) for token in smollm.encode(text))
        assert (passed and matcher.accept(first_end)) is bool(re.fullmatch(pattern, text)), text


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
def test_made_patterns_accept_every_short_text_that_re_matches(small: Vocabulary, pattern: str, seed: int) -> None:
    assume(to_plain_pattern(pattern).weight <= MAX_WEIGHT)  # beyond it there is no eager one
    rng = random.Random(seed)
    eager = in_process(pattern, small)
    assert isinstance(eager, DfaGrammar)
    lazy = LlguidanceGrammar(regex_source(to_plain_pattern(pattern).pattern, small), small)
    for text in rng.sample(SHORT_TEXTS, 60):
        tokens = spelled(text.encode(), small, rng)
        assert tokens is not None
        expected = bool(re.fullmatch(pattern, text))
        assert accepts(eager, tokens, small) is expected, text
        matcher = lazy.matcher()
        assert (all(map(matcher.accept, tokens)) and matcher.is_accepting) is expected, text


class Oracle:
    """What may follow a text of ASCII characters, by interegular: an independent construction of the automaton."""

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
        found = ""
        while self.state(text + found) not in self._fsm.finals:
            ways = [c for c in map(chr, range(128)) if self.state(text + found + c) is not None]
            if len(ways) != 1:
                break
            found += ways[0]
        return found


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
def test_masks_and_forced_bytes_match_an_independent_automaton(small: Vocabulary, pattern: str, seed: int) -> None:
    rng, oracle = random.Random(seed), Oracle(pattern)
    eager = in_process(pattern, small).matcher()
    lazy = LlguidanceGrammar(regex_source(to_plain_pattern(pattern).pattern, small), small).matcher()
    text = ""
    for _ in range(6):
        expected = oracle.allowed(text, small)
        assert (mask_of(eager, len(small)) == expected).all(), text
        forced = oracle.forced(text).encode()
        assert eager.forced_bytes() == forced, text
        assert lazy.forced_bytes() == forced, text
        loose = mask_of(lazy, len(small))
        assert loose.any()
        assert not (loose & ~expected).any(), text
        assert forced or (loose == expected).all(), text
        going_on = [int(i) for i in np.flatnonzero(expected) if i not in small.eos_ids]
        if not going_on:
            break
        token = rng.choice(going_on)
        assert eager.accept(token)
        assert lazy.accept(token)
        text += small.token_bytes[token].decode()


@pytest.mark.parametrize("pattern", [r"[0-9]+(\.[0-9]+)?", "hello world(, hello)*", r"(yes|no|yes please) [a-z]+"])
def test_masks_match_over_the_whole_real_vocabulary(smollm: Vocabulary, pattern: str) -> None:
    oracle, matcher, rng, text = Oracle(pattern), in_process(pattern, smollm).matcher(), random.Random(1), ""
    for _ in range(3):
        expected = oracle.allowed(text, smollm)
        assert (mask_of(matcher, len(smollm)) == expected).all(), text
        assert matcher.forced_bytes() == oracle.forced(text).encode()
        token = rng.choice([int(i) for i in np.flatnonzero(expected) if i not in smollm.eos_ids])
        assert matcher.accept(token)
        text += smollm.token_bytes[token].decode()


def test_a_large_pattern_is_served_step_by_step(smollm: Vocabulary) -> None:
    grammar = in_process(r"(\w+ ?){1,200}", smollm)
    assert isinstance(grammar, LlguidanceGrammar)
    assert accepts(grammar, list(smollm.encode("hello wide world 12")), smollm)
    assert not accepts(grammar, list(smollm.encode("hello, world")), smollm)


def test_nothing_spellable_is_refused_and_dead_ends_are_not_offered(small: Vocabulary) -> None:
    for pattern in ("~", r"[^\s\S]", "a~+"):
        with pytest.raises(GrammarError, match="no text of this constraint can be written"):
            in_process(pattern, small)
    matcher = in_process("a(~|b)|1~", small).matcher()
    assert matcher.forced_bytes() == b"ab"
    assert not matcher.accept(small.token_bytes.index(b"1"))


def test_there_are_two_hundred_patterns() -> None:
    assert len(PATTERNS) >= 200
    assert len(set(PATTERNS)) == len(PATTERNS)


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize("tenth", range(10))
def test_two_hundred_patterns_mean_what_two_oracles_say(tenth: int) -> None:
    for at in range(tenth, len(PATTERNS), 10):
        found = compare_with_oracles(PATTERNS[at], seed=at, num_texts=60)
        assert not found.mismatches, (PATTERNS[at], found.mismatches[:3])
        assert found.num_texts >= 50
