"""`plait.agent` on the embedded model, in its runtime, over HTTP and over a chat API."""

from __future__ import annotations

import pytest
from asgi_server import serve_app

import plait
from plait import Budget, Tool
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings


def population(town: str) -> int:
    """How many thousand people live in a town."""
    return {"rome": 2800}[town.lower()]


SEAT = {"type": "object", "properties": {"seat": {"type": "string", "pattern": "^[A-F][0-9]$"}}, "required": ["seat"]}
TOOLS = [population, Tool("book", "Books a seat.", SEAT, lambda seat: f"{seat} is booked")]
HELPER = plait.agent("You answer questions about towns.", TOOLS, type=int, max_turns=4)
QUESTION = "How many thousand people live in Rome?"


def check(run):
    assert isinstance(run.answer, int) and run.finish_reason in ("answer", "max_turns") and len(run.steps) <= 3
    for step in run.steps:
        assert step.tool in ("population", "book") and step.seconds >= 0
        assert step.error is None or (step.tool == "population" and step.error.startswith("KeyError"))


@pytest.mark.parametrize("seed", range(3))
def test_every_turn_is_a_valid_call_and_reads_the_cached_prefix(runtime, seed):
    state = HELPER.run(QUESTION, backend=runtime, temperature=1.2, seed=seed, max_tokens=64)
    check(state.ret_value)
    for turn in range(2, len(state.ret_value.steps) + 2):
        before, meta = (state.get_meta_info(f"agent_{number}") for number in (turn - 1, turn))
        assert meta["cached_tokens"] >= before["prompt_tokens"]


def test_budget_ends_an_agent(runtime):
    with pytest.raises(plait.ProgramError) as raised:
        HELPER.run(QUESTION, backend=runtime, temperature=0, budget=Budget(tokens=5))
    assert isinstance(raised.value.__cause__, plait.BudgetExceeded | plait.ConstraintFailed)


@pytest.fixture(scope="module")
def address(runtime):
    with serve_app(create_app(runtime, server_settings())) as address:
        yield address


@pytest.mark.parametrize("is_chat", [False, True], ids=["RuntimeEndpoint", "OpenAI"])
def test_same_agent_on_a_server(address, is_chat):
    backend = plait.OpenAI("default", f"{address}/v1") if is_chat else plait.RuntimeEndpoint(address)
    check(HELPER.run(QUESTION, backend=backend, temperature=0, max_tokens=64).ret_value)
    backend.close()
