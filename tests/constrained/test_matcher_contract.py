"""Rules of every matcher: a rejected token changes nothing, rollback is exact, only EOS follows EOS."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from matchers import allowed_tokens, compile_in_process

from plait.constrained import Choices, Grammar, GrammarError, JsonSchema, Matcher, Regex, Vocabulary, mask_words
from plait.constrained.guidance import mask_cache
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar, regex_source
from plait.constrained.json_schema.compiler import compile_json
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
@pytest.mark.parametrize("seed", range(4))
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
    schema = {"properties": {"a": {"type": "string", "maxLength": 9}, "b": {"pattern": "^[a-z]+$"}, "c": {}}}
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
    assert num_kept > 10
    assert len(keeping.masks._masks) < mask_cache.MAX_MASKS


def test_the_kept_masks_are_those_that_most_texts_need() -> None:
    """Texts that have more slow masks than are kept, in turn, do not replace one another's."""
    masks, row = mask_cache.MaskCache(1), np.zeros(1, np.int32)

    def num_found(text: list[int]) -> int:
        found = [masks.get(text[:n]) is not None for n in range(len(text))]
        for n in range(len(text)):
            if not found[n]:
                masks.put(text[:n], row, seconds=1.0)
        return sum(found)

    texts = [[9, 9, *[kind] * 28] for kind in (1, 2)]
    assert [num_found(text) for text in texts] == [0, 3]
    for _ in range(3):
        assert sum(map(num_found, texts)) >= mask_cache.MAX_MASKS
    assert len(masks._masks) == mask_cache.MAX_MASKS - 1
    for kind in range(3, 40):
        num_found([kind, kind])
    assert masks.get([39]) is not None, "masks of other texts take the place of old ones"
    assert len(masks._masks) == mask_cache.MAX_MASKS - 1
