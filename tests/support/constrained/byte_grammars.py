"""Specs compiled over a vocabulary of single bytes: which texts they accept, and the errors of refused specs."""

from __future__ import annotations

import pytest
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY
from schema_strategies import accepts as grammar_accepts

from plait.constrained import GrammarError
from plait.constrained.compiler import compile_spec
from plait.constrained.specs import Spec


def accepts(spec: Spec, *texts: str) -> list[bool]:
    """Whether the spec accepts each of `texts`."""
    grammar = compile_in_process(spec, BYTE_VOCABULARY)
    return [grammar_accepts(grammar, text) for text in texts]


def refusal(spec: Spec) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compile_spec(spec, BYTE_VOCABULARY)
    return caught.value
