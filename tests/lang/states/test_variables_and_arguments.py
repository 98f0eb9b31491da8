"""What a state says of its program: its variables, its arguments, its usage as text; the same on async states."""

from __future__ import annotations

import asyncio

import pytest

import plait
from plait import gen


@plait.function
def draft(s, topic, *more, size=2, **others):
    s += topic + gen("first")
    s["size"] = size
    forks = s.fork(size)
    forks += gen("idea")
    forks.join()


@plait.function
async def draft_async(s, topic, size=2):
    s += topic + gen("first")
    s["size"] = size
    return await s.variables, s.arguments, await s.usage


@plait.function
def inside(s, topic):
    s += topic + gen("first")
    return s.variables, s.arguments


@pytest.fixture(autouse=True)
def answered(backend):
    backend.scheduler.answer = lambda prompt, request: "A."


def test_variables_are_all_values(backend):
    assert draft.run("Tea").variables == {"first": "A.", "size": 2, "idea": ["A.", "A."]}
    assert inside.run("Tea").ret_value == ({"first": "A."}, {"topic": "Tea"})


def test_a_failed_call_is_raised_by_variables():
    @plait.function
    def cut(s):
        s += "x" + gen("number", type=int)

    states = cut.run_batch([{}])
    with pytest.raises(plait.ProgramError, match="number"):
        _ = states[0].variables


def test_arguments_have_names_and_defaults():
    assert draft.run("Tea").arguments == {"topic": "Tea", "more": (), "size": 2, "others": {}}
    state = draft.bind(size=1).run("Tea", "cake", tone="calm", temperature=0)
    assert state.arguments == {"topic": "Tea", "more": ("cake",), "size": 1, "others": {"tone": "calm"}}
    state.arguments["topic"] = "changed"
    assert state.arguments["topic"] == "Tea", "it is a copy"


def test_arguments_of_streams_batches_and_graphs(tmp_path):
    assert inside.run("Tea", stream=True).arguments == {"topic": "Tea"}
    items = [{"topic": "Tea"}, {"topic": "Milk", "size": 1}]
    expected = [{**draft.run(**item).arguments} for item in items]
    for _ in range(2):  # the second time they are read from the file
        states = draft.run_batch(items, resume=tmp_path / "done.jsonl")
        assert [state.arguments for state in states] == expected
    assert draft.compile(size=1).run(topic="Tea").arguments == {"topic": "Tea"}


def test_async_states_have_them_too():
    values, arguments, usage = draft_async.run("Tea").ret_value
    assert values == {"first": "A.", "size": 2} and arguments == {"topic": "Tea", "size": 2} and usage.calls == 1

    async def stream():
        state = await draft_async.arun("Tea", stream=True)
        return await state.variables, state.arguments, (await state.usage).calls, await state.error()

    assert asyncio.run(stream()) == ({"first": "A.", "size": 2}, {"topic": "Tea", "size": 2}, 1, None)


def test_usage_as_a_method_works_for_one_more_release():
    @plait.function
    async def old(s):
        s += "x" + gen("first")
        pending = s.usage
        return (await s.usage()).calls, repr(pending), (await pending).calls

    with pytest.warns(DeprecationWarning, match="await s.usage"):
        assert old.run().ret_value == (1, "<s.usage, not awaited>", 1)


def test_an_awaited_name_says_so_when_it_is_not():
    @plait.function
    async def forgot(s):
        s += "x" + gen("first")
        return s.usage.calls

    with pytest.raises(plait.ProgramError, match=r"write \(await s.usage\)"):
        forgot.run()


def test_usage_as_text_is_two_lines():
    counts = {"prompt_tokens": 1742, "computed_tokens": 120, "cached_tokens": 1622}
    usual = plait.ProgramUsage(calls=1, completion_tokens=30, sampled_tokens=24, forced_tokens=6, wall_s=0.4, **counts)
    assert str(usual) == (
        "1,742 prompt tokens: 120 computed, 1,622 cached\n30 generated: 24 sampled, 6 forced; 1 call in 0.40 s"
    )
    rare = plait.ProgramUsage(calls=2, recomputed_tokens=7, failed_calls=1, lost_tokens=5, queue_s=0.5)
    assert str(rare) == (
        "0 prompt tokens: 0 computed, 0 cached, 7 computed again\n"
        "0 generated: 0 sampled, 0 forced; 2 calls in 0.00 s, 0.50 s queued; 1 failed, 5 tokens lost"
    )
