"""Rules of every matcher: a rejected token changes nothing, rollback is exact, only EOS follows EOS."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from example_share import share_of
from matchers import allowed_tokens, compile_in_process

from plait.constrained import Choices, Grammar, GrammarError, JsonSchema, Matcher, Regex, Vocabulary, mask_words
from plait.constrained.guidance import llguidance_grammar
from plait.constrained.guidance.llguidance_grammar import MAX_MASKS, LlguidanceGrammar, MaskCache, regex_source
from plait.constrained.json_schema.schema_compiler import compile_json
from plait.constrained.specs import Spec


def grammars(vocabulary: Vocabulary) -> list[Grammar]:
    specs: list[Spec] = [Regex("(ab|a)*1?"), Choices(("yes", "yes please", "ab")), Regex("ab{1,3}(é|日本)")]
    lazy = [
        LlguidanceGrammar(regex_source(text, vocabulary), vocabulary) for text in ("(?:ab|a)*1?", "ab{1,3}(?:é|日本)")
    ]
    return [compile_in_process(spec, vocabulary) for spec in specs] + lazy


def snapshot(matcher: Matcher, width: int) -> tuple[bytes, bytes, bool, bool]:
    row = np.zeros(mask_words(width), np.int32)
    matcher.fill_mask(row)
    return row.tobytes(), matcher.forced_bytes(), matcher.is_accepting, matcher.is_terminated


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("seed", range(share_of(4)))
def test_rollback_restores_the_state_and_rejected_tokens_do_not_change_it(
    small: Vocabulary, index: int, seed: int
) -> None:
    width, rng = len(small), random.Random(seed)
    matcher = grammars(small)[index].matcher()
    snapshots = [snapshot(matcher, width)]
    for _ in range(40):
        if rng.random() < 0.3 and len(snapshots) > 1:
            n = rng.randrange(len(snapshots))
            matcher.rollback(n)
            del snapshots[len(snapshots) - n :]
        else:
            for token in (rng.randrange(width), -1, width, width + 10**12):
                if token not in allowed_tokens(matcher, small) and not matcher.accept(token):
                    assert snapshot(matcher, width) == snapshots[-1]
                    continue
                if token not in range(width) or token not in allowed_tokens(matcher, small):
                    snapshots.append(snapshot(matcher, width))
            token = rng.choice(allowed_tokens(matcher, small))
            assert matcher.accept(token)
            snapshots.append(snapshot(matcher, width))
        assert snapshot(matcher, width) == snapshots[-1]
    with pytest.raises(ValueError, match="cannot roll back"):
        matcher.rollback(len(snapshots))
    matcher.rollback(len(snapshots) - 1)
    assert snapshot(matcher, width) == snapshots[0]


@pytest.mark.parametrize("index", range(5))
def test_what_is_accepted_does_not_depend_on_the_masks_that_were_filled(small: Vocabulary, index: int) -> None:
    rng, grammar = random.Random(index), grammars(small)[index]
    with_masks, without = grammar.matcher(), grammar.matcher()
    row, length = np.zeros(mask_words(len(small)), np.int32), 0
    likely = [token for token, text in enumerate(small.token_bytes) if text and not text.strip("ab1é日本".encode())]
    for _ in range(400):
        if rng.random() < 0.5:
            with_masks.fill_mask(row)
        if length and rng.random() < 0.3:
            n = rng.randint(1, length)
            length -= n
            with_masks.rollback(n)
            without.rollback(n)
        token = rng.choice(likely)
        is_accepted = with_masks.accept(token)
        assert is_accepted == without.accept(token)
        length += is_accepted


class Recorded:
    """An inner matcher, and the names of what it is asked for."""

    def __init__(self, inner: Any) -> None:
        self._of, self.asked = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._of, name)


def test_what_is_forced_at_the_start_is_found_before_there_are_copies(
    small: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Recorded]()
    compiled = llguidance_grammar.compile_inner_matcher

    def recorded(text: str, vocabulary: Vocabulary) -> Recorded:
        made.append(Recorded(compiled(text, vocabulary)))
        return made[-1]

    monkeypatch.setattr(llguidance_grammar, "compile_inner_matcher", recorded)
    grammar = LlguidanceGrammar(regex_source("ab{1,3}", small), small)
    assert grammar.matcher().forced_bytes() == b"ab"
    assert made[-1].asked[:2] == ["compute_ff_bytes", "deep_copy"]


def test_a_token_of_the_mask_is_not_looked_up_again(small: Vocabulary) -> None:
    grammar = LlguidanceGrammar(regex_source("[ab]{1,3}", small), small)
    matcher = grammar.matcher()
    inner, row = Recorded(matcher._inner), np.zeros(mask_words(len(small)), np.int32)
    matcher._inner, asked = inner, inner.asked
    a, b = (small.token_bytes.index(text) for text in (b"a", b"b"))
    matcher.fill_mask(row)
    assert matcher.accept(a)
    assert "validate_tokens" not in asked
    assert matcher.accept(b)
    assert "validate_tokens" in asked, "no mask was filled after the first token"


@pytest.mark.parametrize("index", range(5))
def test_only_eos_is_allowed_after_eos(small: Vocabulary, index: int) -> None:
    grammar, width = grammars(small)[index], len(small)
    matcher, rng = grammar.matcher(), random.Random(index)
    while not matcher.is_accepting:
        assert not matcher.accept(small.eos_ids[0])
        matcher.accept(rng.choice(allowed_tokens(matcher, small)))
    before = snapshot(matcher, width)
    assert set(small.eos_ids) <= set(allowed_tokens(matcher, small))
    assert matcher.accept(small.eos_ids[1])
    assert matcher.is_terminated
    assert matcher.is_accepting
    assert allowed_tokens(matcher, small) == list(small.eos_ids)
    assert matcher.forced_bytes() == b""
    assert not matcher.accept(small.token_bytes.index(b"a"))
    assert matcher.accept(small.eos_ids[0])
    matcher.rollback(2)
    assert snapshot(matcher, width) == before
    assert not grammar.matcher().is_terminated


def test_a_pattern_that_matches_the_empty_text_allows_eos_at_the_start(small: Vocabulary) -> None:
    matcher = compile_in_process(Regex("a*"), small).matcher()
    assert matcher.is_accepting
    assert matcher.forced_bytes() == b""
    assert matcher.accept(small.eos_ids[0])


def test_a_lexer_that_exceeds_its_limit_fails_only_its_matcher(smollm: Vocabulary) -> None:
    grammar = LlguidanceGrammar(regex_source("(?:(?:a){1,1000}){1,1000}", smollm), smollm)
    other, token = grammar.matcher(), smollm.token_bytes.index(b"aa")
    assert other.accept(token)
    row = np.zeros(mask_words(len(smollm)), np.int32)

    def accept_2000_tokens(matcher: Matcher) -> None:
        for _ in range(2000):
            matcher.fill_mask(row)
            assert matcher.accept(token)

    unmasked = grammar.matcher()
    assert unmasked.accept(token)
    with pytest.raises(GrammarError):
        accept_2000_tokens(grammar.matcher())
    assert unmasked.accept(token)
    assert not unmasked.accept(smollm.token_bytes.index(b"b"))
    other.fill_mask(row)
    assert other.accept(token)
    fresh = grammar.matcher()
    fresh.fill_mask(row)
    assert fresh.accept(token)


def test_a_mask_that_is_kept_is_the_one_that_would_be_computed(smollm: Vocabulary) -> None:
    properties = {"a": {"type": "string", "maxLength": 9}, "b": {"pattern": "^[a-z]+$"}, "c": {}}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    keeping, computing = (LlguidanceGrammar(compile_json(JsonSchema(schema), smollm), smollm) for _ in range(2))
    keeping.masks.slow_s, computing.masks.slow_s = 0.0, math.inf
    rng, num_kept = random.Random(3), 0
    row, computed = np.zeros((2, mask_words(len(smollm))), np.int32)
    for _ in range(12):
        matcher, other, tokens = keeping.matcher(), computing.matcher(), list[int]()
        for _ in range(30):
            num_kept += bool(tokens) and keeping.masks.get(tokens) is not None
            matcher.fill_mask(row)
            other.fill_mask(computed)
            assert np.array_equal(row, computed)
            tokens.append(int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[:3])))
            assert matcher.accept(tokens[-1])
            assert other.accept(tokens[-1])
            if matcher.is_terminated:
                break
            if rng.random() < 0.2:
                matcher.rollback(1)
                other.rollback(1)
                tokens.pop()
    assert num_kept
    assert len(keeping.masks._masks) < MAX_MASKS


def test_no_mask_is_kept_after_bytes_that_a_model_has_chosen(smollm: Vocabulary) -> None:
    """Masks are shared by all users: the time of one must not tell how a value of another one began."""
    name = {"type": "string", "pattern": "^[a-z]{3,9}$"}
    schema = {"type": "object", "properties": {"name": name}, "required": ["name"], "additionalProperties": False}
    grammar = LlguidanceGrammar(compile_json(JsonSchema(schema), smollm), smollm)
    grammar.masks.slow_s = 0.0
    matcher, row, forced = grammar.matcher(), np.zeros(mask_words(len(smollm)), np.int32), b'{"name": "'
    assert matcher.forced_bytes() == forced
    text, tokens = b"", list[int]()
    for token in (*smollm.encode(forced.decode()), *smollm.encode("abc")):
        matcher.fill_mask(row)
        assert matcher.accept(token)
        tokens.append(token)
        text += smollm.token_bytes[token]
        matcher.fill_mask(row)
        assert (grammar.masks.get(tokens) is not None) == forced.startswith(text)
    assert len(tokens) > 4 and grammar.masks.get(tokens[:2]) is not None


def test_the_number_of_kept_masks_is_bounded() -> None:
    masks, row = MaskCache(1, b"a" * 100, (b"a",)), np.zeros(1, np.int32)
    for n in range(100):
        masks.put([0] * n, row, seconds=1.0)
    assert [masks.get([0] * n) is not None for n in (0, 1, MAX_MASKS - 1, MAX_MASKS, 99)] == [
        True,
        True,
        True,
        False,
        False,
    ]
