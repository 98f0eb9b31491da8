"""`select` over an Enum, a Literal or bool: the value is one of the type's values."""

from __future__ import annotations

import enum
from typing import Literal

import pytest
from sample_programs import run_expression

import plait
from plait import select


class Topic(enum.Enum):
    BILLING = "billing"
    DELIVERY = 2


@pytest.mark.parametrize(
    ("choices", "texts", "value"),
    [
        (Topic, ["billing", "DELIVERY"], Topic.DELIVERY),
        (Literal["low", 3, None], ["low", "3", "null"], 3),
        (bool, ["true", "false"], False),
    ],
)
def test_the_value_is_one_of_the_type(backend, choices, texts, value):
    backend.scheduler.pick = lambda prompt, scored: 1
    state = run_expression(select("x", choices))
    assert state["x"] is value and state.text_of("x") == texts[1]
    assert state.get_meta_info("x")["choices"] == texts


def test_a_compiled_program_reads_the_value_too(backend):
    backend.scheduler.pick = lambda prompt, scored: 1

    @plait.function
    def program(s):
        s += "p" + select("x", Topic)

    graph = program.compile()
    assert graph.run()["x"] is Topic.DELIVERY
    assert graph.json()["program"][1]["select"]["choices"] == ["billing", "DELIVERY"]


@pytest.mark.parametrize("choices", [int, list[str], Literal], ids=str)
def test_types_with_more_values_are_refused(choices):
    with pytest.raises(plait.InputError, match="choice"):
        select("x", choices)
