"""Grammars compiled in this process, and the tokens that a matcher's mask allows."""

from __future__ import annotations

import numpy as np

from plait.constrained import Grammar, Matcher, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.specs import Spec


def compile_in_process(spec: Spec, vocabulary: Vocabulary) -> Grammar:
    return build_grammar(compile_spec(spec, vocabulary), vocabulary)


def token_mask(matcher: Matcher, vocabulary: Vocabulary) -> np.ndarray:
    """Whether the matcher's mask allows each token, bool [V]. Asserts that the padding bits are zero."""
    row = np.full(mask_words(len(vocabulary)), -1, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[len(vocabulary) :].any()
    return bits[: len(vocabulary)]


def allowed_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    return np.flatnonzero(token_mask(matcher, vocabulary)).tolist()
