"""Seeds on the embedded model: a sampled program repeats in every run mode, and its branches differ."""

from __future__ import annotations

import httpx
import pytest
from asgi_server import serve_app

import plait
from plait import assistant, gen, user
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

HOW = {"temperature": 1.0, "seed": 7, "max_tokens": 6}


@pytest.fixture(scope="module")
def address(exact):
    with serve_app(create_app(exact, server_settings())) as address:
        yield address


@plait.function
def tips(s, question):
    s += question + gen("first")
    forks = s.fork(3)
    forks += "\nTip:" + gen("tip")
    forks.join()
    s += "\nSo" + gen("last", n=2)


def values(state):
    return [state["first"], *state["tip"], *state["last"]]


def test_branches_and_items_differ_and_repeat_in_every_run_mode(exact, address):
    state = tips.run("How to bake bread?", backend=exact, **HOW)
    assert len(set(values(state))) == 6
    batch = tips.run_batch([{"question": "How to bake bread?"}] * 3, backend=exact, **HOW)
    assert len({tuple(values(item)) for item in batch}) == 3 and values(batch[0]) == values(state)
    graph = tips.compile(**HOW)
    assert values(graph.run(question="How to bake bread?", backend=exact)) == values(state)
    answer = httpx.post(f"{address}/v1/programs", json=graph.json(question="How to bake bread?"), timeout=60)
    assert values(answer.json()["variables"]) == values(state)
    endpoint = plait.RuntimeEndpoint(address)
    assert values(tips.run("How to bake bread?", backend=endpoint, **HOW)) == values(state)
    endpoint.close()
    alike = tips.run("How to bake bread?", backend=exact, same_seed=True, **HOW)
    assert len(set(alike["tip"])) == 1


def test_chat_backend_sends_the_seed_of_each_branch(address, exact):
    @plait.function
    def program(s):
        s += user("Name a bird.")
        forks = s.fork(3)
        forks += assistant(gen("bird"))
        forks.join()

    chat = plait.OpenAI("default", f"{address}/v1")
    birds = [program.run(backend=backend, **HOW)["bird"] for backend in (exact, chat, chat)]
    chat.close()
    assert birds[0] == birds[1] == birds[2] and len(set(birds[0])) == 3
