"""`forks.cancel()`: the calls of all branches end, and the program continues."""

from __future__ import annotations

import asyncio

import pytest
from scripted_scheduler import Gate

import plait
from plait import gen

pytestmark = pytest.mark.timeout(120)


def test_a_cancelled_group_ends_and_the_program_continues(backend):
    gates = [Gate("late"), Gate("late")]
    backend.script(("0", gates[0]), ("1", gates[1]), default="fast")

    @plait.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks += lambda i: f"{i}" + gen("x")
        forks.cancel()
        with pytest.raises(plait.ProgramError, match="aborted"):
            forks[1]["x"]
        s += gen("y")

    state = program.run()
    assert state["y"] == "fast" and state.error() is None and "x" not in state


def test_a_cancelled_group_of_an_async_program(backend):
    backend.script(("slow", Gate("late")), default="fast")

    @plait.function
    async def program(s):
        s += "Q"
        forks = s.fork(2)
        forks += "slow" + gen("x")
        forks.cancel()
        s += gen("y")
        return await s["y"]

    assert asyncio.run(program.arun()).ret_value == "fast"
