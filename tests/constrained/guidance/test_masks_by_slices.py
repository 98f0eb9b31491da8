"""Slices change what a mask costs, not which tokens it has."""

from __future__ import annotations

import random

import numpy as np
import pytest
from example_share import sample_of

from plait.constrained import JsonSchema, Vocabulary, mask_words
from plait.constrained.guidance.inner_matcher import warm_up
from plait.constrained.guidance.llguidance_grammar import LlguidanceGrammar
from plait.constrained.json_schema.schema_compiler import compile_json

SCHEMAS = {
    "letters": {"type": "string", "pattern": r"^(?:[A-Za-z]+\.)*[A-Za-z0-9]{1,20}$"},
    "an end": {"type": "string", "pattern": "^(?:[A-Za-z]{4}|[A-Z][a-z]{0,7}-[A-Za-z]{2,9})$"},
    "a length": {"type": "string", "minLength": 3, "maxLength": 9},
    "names": {"properties": {"about": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
    "names of a pattern": {"propertyNames": {"pattern": "^[A-Za-z]{1,8}$", "not": {"enum": ["about"]}}},
    **{name: {"type": "string", "format": name} for name in ("email", "hostname", "uri", "json-pointer", "regex")},
}


@pytest.fixture(scope="module")
def vocabularies(smollm: Vocabulary) -> tuple[Vocabulary, Vocabulary]:
    """Two equal ones, the first with slices, the second without."""
    plain = Vocabulary(smollm.token_bytes, smollm.eos_ids, smollm.encode)
    warm_up(plain, masks_quickly=False)
    return smollm, plain


@pytest.mark.parametrize("name", sample_of(list(SCHEMAS), least=5))
def test_masks_have_the_same_tokens_with_slices_and_without(vocabularies, name: str) -> None:
    rng, texts = random.Random(name), vocabularies[0].token_bytes
    rows = [np.zeros(mask_words(len(texts)), np.int32) for _ in vocabularies]
    source = compile_json(JsonSchema(SCHEMAS[name]), vocabularies[0])
    grammars = [LlguidanceGrammar(source, vocabulary) for vocabulary in vocabularies]
    for _ in range(8):
        matchers = [grammar.matcher() for grammar in grammars]
        for _ in range(12):
            for matcher, row in zip(matchers, rows, strict=True):
                matcher.fill_mask(row)
            assert np.array_equal(*rows)
            allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
            token = int(rng.choice([token for token in allowed if len(texts[token]) < 4] or list(allowed)))
            assert all(matcher.accept(token) for matcher in matchers)
            if matchers[0].is_terminated:
                break
