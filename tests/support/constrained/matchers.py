"""Grammars compiled in this process, and the tokens that a matcher's mask allows."""

from __future__ import annotations

import numpy as np

from plait.constrained import Grammar, Matcher, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.specs import Spec


def compile_in_process(spec: Spec, vocabulary: Vocabulary) -> Grammar:
    return build_grammar(compile_spec(spec, vocabulary), vocabulary)


def allowed_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    row = np.zeros(mask_words(len(vocabulary)), np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
