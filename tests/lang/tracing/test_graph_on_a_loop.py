"""`graph.arun`: a compiled program on an event loop."""

from __future__ import annotations

import asyncio

import pytest
from scripted_scheduler import Gate

import plait
from plait import gen
from plait.runtime.messages import Generate

pytestmark = pytest.mark.timeout(120)


@plait.function
def tips(s, topic):
    s += f"About {topic}:" + gen("first")
    branches = s.fork(2)
    branches += lambda i: f" {i}:" + gen("more")
    branches.join()


def test_a_graph_runs_on_a_loop_as_it_does_without_one(backend):
    graph = tips.compile()

    async def main():
        return await asyncio.gather(*(graph.arun(topic=topic) for topic in ("a", "b")))

    states = asyncio.run(main())
    assert [state.text() for state in states] == [graph.run(topic=topic).text() for topic in ("a", "b")]
    assert states[0]["more"] == graph.run(topic="a")["more"]


def test_the_loop_goes_on_and_a_cancelled_task_ends_the_calls(backend):
    gate = Gate("fine")
    backend.scheduler.answer = lambda prompt, request: gate

    async def main():
        task = asyncio.create_task(tips.compile().arun(topic="a"))
        while not backend.scheduler.sent(Generate):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 60))
    gate.open()


def test_wrong_arguments_are_refused(backend):
    with pytest.raises(plait.InputError, match="the argument 'topic' is missing"):
        asyncio.run(tips.compile().arun())
    with pytest.raises(plait.InputError, match="'seed' belongs to compile"):
        asyncio.run(tips.compile().arun(topic="a", seed=1))
    with pytest.raises(plait.InputError, match="'sampling' belongs to compile"):
        tips.compile().run(topic="a", sampling={"seed": 1})
