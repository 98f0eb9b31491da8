"""best_of, vote and map in async programs: awaited, with judges and writers that may be `async def`."""

from __future__ import annotations

import asyncio

import pytest

import plait
from plait import assistant, gen, user

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def numbers(backend):
    """Makes 0, 1, 2, ... the answers."""
    count = iter(range(1000))
    backend.scheduler.answer = lambda prompt, request: str(next(count))
    return backend


def test_best_of_adopts_the_branch_with_the_best_score(numbers):
    @plait.function
    async def program(s):
        s += user("Q")
        scores = await plait.best_of(s, 3, assistant(gen("x")), by=closeness)
        return scores, await s["x"]

    async def closeness(branch):
        return -abs(int(await branch["x"]) - 1)

    state = program.run()
    assert state.ret_value == ([-1.0, 0.0, -1.0], "1") and state["x"] == "1"
    assert state.messages() == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "1"}]
    assert state.error() is None


def test_judges_run_at_the_same_time(numbers):
    async def judge(branch):
        branch += " Score: " + gen("score", type=int)
        await barrier.wait()  # passed when all three have written
        return await branch["score"]

    @plait.function
    async def program(s):
        nonlocal barrier
        barrier = asyncio.Barrier(3)
        s += "Q"
        async with asyncio.timeout(60):
            return await plait.best_of(s, 3, gen("x"), judge)

    barrier = None
    state = program.run()
    assert state.ret_value == [3.0, 4.0, 5.0] and state.text() == "Q2" and "score" not in state


def test_a_judge_may_return_a_function_that_reads(numbers):
    order = []

    def judge(branch):
        branch += " Score: " + gen("score", type=int)
        order.append("written")

        async def read():
            order.append("read")
            return await branch["score"]

        return read

    @plait.function
    async def program(s):
        s += "Q"
        return await plait.best_of(s, 3, gen("x"), judge)

    assert program.run().ret_value == [3.0, 4.0, 5.0]
    assert order == ["written"] * 3 + ["read"] * 3


def test_vote_adopts_the_most_frequent_value(backend):
    answers = iter(["7", "8", "9", "8", "7", "8"])
    backend.scheduler.answer = lambda prompt, request: next(answers)

    @plait.function
    async def program(s):
        s += "Q"
        return await plait.vote(s, 6, ": " + gen("x", type=int), "x")

    state = program.run()
    assert state.ret_value == state["x"] == 8 and state.text() == "Q: 8"


def test_map_takes_plain_and_async_writers(numbers):
    def write(branch, item):
        branch += item + gen("x")

    async def write_twice(branch, item):
        branch += item + gen("x")
        branch += await branch["x"] + gen("y")

    @plait.function
    async def program(s, writer):
        s += "Q"
        branches = await plait.map(s, ["a", "b"], writer)
        return len(branches), await s["x"]

    assert program.run(write).ret_value == (2, ["0", "1"])
    state = program.run(write_twice)
    (first, second), later = state.ret_value[1], state["y"]
    assert {first, second, *later} == {"2", "3", "4", "5"} and first < later[0] and second < later[1]


def test_an_error_of_one_judge_ends_the_others(numbers):
    ended = []

    async def judge(branch):
        if await branch["x"] == "1":
            raise KeyError("no score")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(await branch["x"])

    @plait.function
    async def program(s):
        s += "Q"
        await plait.best_of(s, 3, gen("x"), by=judge)

    with pytest.raises(plait.ProgramError, match="no score"):
        program.run()
    assert sorted(ended) == ["0", "2"]


def test_an_async_map_compiles(numbers):
    async def write(branch, item):
        branch += item + gen("x")

    @plait.function
    async def program(s):
        s += "Q"
        await plait.map(s, ["a", "b"], write)

    assert program.compile().run()["x"] == ["0", "1"]


def test_wrong_arguments_are_refused(numbers):
    async def judge(branch):
        return 1.0

    @plait.function
    def plain(s, kind):
        s += "Q"
        if kind == "best_of":
            plait.best_of(s, 2, gen("x"), by=judge)
        else:
            plait.map(s, ["a"], lambda branch, item: judge(branch))

    for kind in ("best_of", "map"):
        with pytest.raises(plait.ProgramError, match=f"{kind}: .* is async def, which only the state of an async"):
            plain.run(kind)
    for call in (
        lambda s: plait.best_of(s, 2, gen("x"), by=len),
        lambda s: plait.vote(s, 2, gen("x"), "x"),
        lambda s: plait.map(s, ["a"], print),
    ):
        with pytest.raises(plait.InputError, match="takes the state of a program, not 'text'"):
            call("text")
