"""Small specs compiled without a worker: the same automaton, a bound on everything else."""

from __future__ import annotations

import numpy as np
import pytest

from plait.constrained import Choices, CompilePool, JsonSchema, Regex, Vocabulary
from plait.constrained.compile_service.in_place import compile_in_place
from plait.constrained.compiler import compile_spec
from plait.constrained.dfa.token_dfa import TokenDfa
from plait.constrained.regex.char_classes import warm_up_classes
from plait.constrained.specs import Spec

SMALL: list[Spec] = [
    Choices(("true", "false")),
    Regex("-?(?:0|[1-9][0-9]{0,17})"),
    Regex("-?(?:0|[1-9][0-9]{0,14})(?:[.][0-9]{1,12})?"),
    Regex("[0-9a-f]{8}-[0-9a-f]{4}"),
    Regex("1[0-9]{3}|20[0-9]{2}"),
    Regex("[A-Za-z ]{5,30}"),
    Regex("Name: [A-Za-z ]{5,30}"),
    Regex(r"\d{3}-\d{4}"),
    Regex("[^\n]+"),
    Regex("é|.{2}"),
]
OTHERS: list[Spec] = [
    Choices(("a" * 600, "b")),
    Regex(r"\w+"),
    Regex("(?i)a"),
    Regex(".{1,60}"),
    Regex("." * 100),
    Regex(r"\s" * 9),
    Regex("[01]*1" + "[01]" * 15),
    Regex("(?:0{90}){90}"),
    Regex("("),
    Choices(("a~",)),  # no token spells it
    JsonSchema({"type": "string", "format": "date"}),
]


@pytest.mark.parametrize("spec", SMALL)
def test_the_automaton_is_that_of_a_worker(smollm: Vocabulary, spec: Spec) -> None:
    warm_up_classes()
    one, other = compile_in_place(spec, smollm), compile_spec(spec, smollm)
    assert one is not None and isinstance(other, TokenDfa)
    assert one.partitions == other.partitions
    for name in ("partition_of", "row_offsets", "nodes", "next_states", "accepting", "distance"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("spec", OTHERS)
def test_all_other_specs_are_left_to_a_worker(small: Vocabulary, spec: Spec) -> None:
    assert compile_in_place(spec, small) is None


def test_a_pool_answers_a_small_spec_without_a_process(smollm: Vocabulary) -> None:
    pool = CompilePool(smollm, start_eagerly=False, in_place=True)
    pool.start()
    try:
        ticket = pool.submit(SMALL[1])
        ((answered, grammar),) = pool.collect()
        assert answered == ticket
        assert grammar is pool.cache.get(SMALL[1])
        assert len(pool.filenos()) == 1  # only that of its threads: no process was started
        pool._in_place.not_before = float("inf")  # the share of the caller's time is used up
        pool.submit(SMALL[0])
        assert pool.collect() == []
        assert len(pool.filenos()) > 1
    finally:
        pool.close()


def test_what_spelling_forced_text_needs_is_built_before_the_constraint_starts(small: Vocabulary) -> None:
    """The time of its tokens counts against a limit of its own, and building a tokenizer takes as long as that."""
    asked = list[str]()
    ours = Vocabulary(small.token_bytes, small.eos_ids, lambda text: asked.append(text) or small.encode(text))
    pool = CompilePool(ours, start_eagerly=False, in_place=True)
    pool.start()
    try:
        pool.submit(Regex("1[0-9]"))
        assert len(pool.collect()) == 1
        assert asked
    finally:
        pool.close()
