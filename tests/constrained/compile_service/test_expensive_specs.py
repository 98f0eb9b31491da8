"""Specs that are expensive to compile end with a grammar or a short error."""

from __future__ import annotations

from time import monotonic

import pytest
from expensive_specs import EXPENSIVE_SPECS

from plait.constrained import GrammarError, Vocabulary, compile_grammar
from plait.constrained.specs import Regex


@pytest.mark.parametrize("name", EXPENSIVE_SPECS)
def test_an_expensive_spec_compiles_or_raises_within_a_time_limit(small: Vocabulary, name: str) -> None:
    compile_grammar(Regex("warm"), small)
    start, reason = monotonic(), ""
    try:
        compile_grammar(EXPENSIVE_SPECS[name](), small)
    except GrammarError as error:
        reason = str(error)
    assert len(reason) < 500
    assert monotonic() - start < 120  # the child's limit is 2 s; this machine may be busy
