"""A straight-line program gives the same result in every run mode, and a batch computes its shared prefix once.

Client, scheduler, prefix cache and server are real, the model is a hash chain; tests/end_to_end/test_run_modes_agree.py
runs some of this with a real model.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest
from asgi_server import serve_app
from chain_engine import chain_engine
from hypothesis import HealthCheck, given, settings
from scripted_scheduler import byte_tokenizer
from straight_line_programs import check_remaining_run_modes, programs

import plait
from plait import assistant, gen, select, system, user
from plait.runtime.messages import Append, Fork, Generate, Select
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

# The server may close an idle connection while a request takes it.
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture(scope="module")
def backend():
    with chain_engine(byte_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(backend):
    with (
        serve_app(create_app(backend, server_settings())) as address,
        httpx.Client(base_url=address, limits=NO_KEEPALIVE, timeout=60) as client,
    ):
        yield client


@settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=programs())
def test_straight_line_program_gives_the_same_result_in_every_run_mode(backend, server, steps):
    check_remaining_run_modes(steps, backend, server, temperature=0, max_tokens=6)


@settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=programs())
def test_sampled_program_gives_the_same_result_in_every_run_mode(backend, server, steps):
    check_remaining_run_modes(steps, backend, server, temperature=1.0, seed=5, max_tokens=6)


NO_ROOM = {
    "no value fits": {"regex": "a{20}", "complete": True, "max_tokens": 3},
    "no value is possible": {"regex": "a{20}", "exact": True, "max_tokens": 3},
}


@pytest.mark.parametrize("options", NO_ROOM.values(), ids=NO_ROOM)
def test_a_failed_call_has_the_same_error_in_every_run_mode(backend, server, options):
    @plait.function
    def program(s):
        s += "Say: " + gen("x", **options)

    @plait.function
    async def later(s):
        s += "Say: " + gen("x", **options)

    graph = program.compile()
    causes = []
    for run in (
        lambda: program.run(backend=backend),
        lambda: asyncio.run(later.arun(backend=backend)),
        lambda: graph.run(backend=backend),
        lambda: later.compile().run(backend=backend),
    ):
        with pytest.raises(plait.ProgramError) as failed:
            run()
        causes.append((failed.value.variable, str(failed.value.__cause__)))
    answer = server.post("/v1/programs", json=graph.json())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "program[1].gen.regex")
    assert set(causes) == {("x", answer.json()["error"]["message"])}


SHARED = "You judge statements, carefully and one at a time. " * 12


def judge_program(first):
    """A program whose prompt starts with shared text and whose first call is `first`."""

    @plait.function
    def judge(s, number):
        s += system(SHARED) + user(f"Is {number} even?")
        if first == "gen":
            s += assistant(gen("x"))
        elif first == "select":
            s += assistant(select("x", ["yes", "no"]))
        elif first == "n":
            s += assistant(gen("x", n=3))
        else:
            forks = s.fork(2)
            forks += lambda i: assistant(f"{i}: " + gen("x"))
            forks.join()

    return judge


def run_and_record_prompts(client, run):
    """(result of `run()`, prompt tokens of every call that it sent)."""
    texts, prompts, send = {}, [], client.send

    def record_and_send(request):
        match request:
            case Append(session, token_ids):
                texts[session] = (*texts.get(session, ()), *token_ids)
            case Fork(session, children):
                texts.update(dict.fromkeys(children, texts[session]))
            case Generate(session) | Select(session):
                prompts.append(texts[session])
        send(request)

    client.send = record_and_send
    try:
        return run(), prompts
    finally:
        del client.send


@pytest.mark.parametrize("threads", [1, 3, "auto"])
@pytest.mark.parametrize("first", ["gen", "select", "n", "fork"])
def test_batch_computes_the_shared_prefix_once(backend, first, threads):
    client, judge = backend.client, judge_program(first)
    client.flush_cache()
    items = [{"number": number} for number in range(24)]
    options = {"backend": backend, "num_threads": threads, "temperature": 0, "max_tokens": 1}
    states, prompts = run_and_record_prompts(client, lambda: judge.run_batch(items, **options))
    distinct_prefixes = {hash(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    repeated = 2 * len(items) if first == "n" else 0  # every sample computes the last token's logits
    assert sum(state.usage.computed_tokens for state in states) == len(distinct_prefixes) + repeated
    assert len(distinct_prefixes) < 1800 < 24 * len(SHARED)


def test_cache_computes_the_constant_prefix_ahead_of_runs(backend):
    backend.client.flush_cache()
    judge = judge_program("gen")
    prefix_tokens = judge.cache(backend)
    assert prefix_tokens > len(SHARED) and judge.cache(backend) <= 1
    state = judge.run("seven", backend=backend, temperature=0, max_tokens=1)
    assert state.usage.cached_tokens >= prefix_tokens - 1
