"""A straight-line program gives the same however it is run, and what the items of a batch share is computed once.

Client, scheduler, prefix cache and server are real, the model is a hash chain; tests/end_to_end/test_run_modes_agree.py
does the same with a model, a few times.
"""

from __future__ import annotations

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

ONE_EACH = httpx.Limits(max_keepalive_connections=0)  # the server closes idle connections, and may while one is taken


@pytest.fixture(scope="module")
def backend():
    with chain_engine(byte_tokenizer()) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(backend):
    with (
        serve_app(create_app(backend, server_settings())) as address,
        httpx.Client(base_url=address, limits=ONE_EACH) as client,
    ):
        yield client


@settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=programs())
def test_any_straight_line_program_gives_the_same_however_it_is_run(backend, server, steps):
    check_remaining_run_modes(steps, backend, server, temperature=0, max_tokens=6)


SHARED = "You judge statements, carefully and one at a time. " * 12


def judging(first):
    """A program that begins with a text of its own, and then does what `first` says."""

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


def prompts_of(client, run):
    """What `run()` gives, and the tokens before each call that was made meanwhile."""
    texts, prompts, send = {}, [], client.send

    def watch(request):
        match request:
            case Append(session, token_ids):
                texts[session] = (*texts.get(session, ()), *token_ids)
            case Fork(session, children):
                texts.update(dict.fromkeys(children, texts[session]))
            case Generate(session) | Select(session):
                prompts.append(texts[session])
        send(request)

    client.send = watch
    try:
        return run(), prompts
    finally:
        del client.send


@pytest.mark.parametrize("threads", [1, 3, "auto"])
@pytest.mark.parametrize("first", ["gen", "select", "n", "fork"])
def test_a_batch_computes_what_its_items_share_once(backend, first, threads):
    client, judge = backend.client, judging(first)
    client.flush_cache()
    items = [{"number": number} for number in range(24)]
    how = {"backend": backend, "num_threads": threads, "temperature": 0, "max_tokens": 1}
    states, prompts = prompts_of(client, lambda: judge.run_batch(items, **how))
    places = {hash(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    again = 2 * len(items) if first == "n" else 0  # the last token's logits, for each sample of its own
    assert sum(state.usage.computed_tokens for state in states) == len(places) + again
    assert len(places) < 1800 < 24 * len(SHARED)


def test_cache_computes_the_constant_beginning_ahead(backend):
    backend.client.flush_cache()
    judge = judging("gen")
    ahead = judge.cache(backend)
    assert ahead > len(SHARED) and judge.cache(backend) <= 1
    state = judge.run("seven", backend=backend, temperature=0, max_tokens=1)
    assert state.usage.cached_tokens >= ahead - 1
