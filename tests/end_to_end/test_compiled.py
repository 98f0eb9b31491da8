"""A straight-line program gives the same variables however it is run, and what programs share is computed once."""

from __future__ import annotations

import httpx
import pytest
from hosting import hosted
from hypothesis import HealthCheck, given, settings
from straight_programs import check_all_ways, programs

import plait
from plait import assistant, gen, select, system, user
from plait.runtime.messages import Append, Fork, Generate, Select
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings


@pytest.fixture(scope="module")
def server(exact):
    with hosted(create_app(exact, server_settings())) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


@settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(steps=programs())
def test_any_straight_line_program_gives_the_same_however_it_is_run(exact, server, steps):
    check_all_ways(steps, exact, server, temperature=0, max_tokens=2)


SHARED = "You judge statements, carefully and one at a time. " * 4


def program(first):
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


def fewest(client, run):
    """The states that `run()` gives, and the fewest tokens that can be computed for their calls: each place in the tree
    of all their prompts once."""
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
        states = run()
    finally:
        del client.send
    return states, len({prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)})


@pytest.mark.parametrize("first", ["gen", "select", "n", "fork"])
@pytest.mark.parametrize("threads", [1, "auto"])
def test_a_batch_computes_what_its_items_share_once(exact, first, threads):
    exact.client.flush_cache()
    items, judge = [{"number": number} for number in range(6)], program(first)
    states, best = fewest(
        exact.client, lambda: judge.run_batch(items, backend=exact, num_threads=threads, temperature=0, max_tokens=1)
    )
    computed = sum(state.usage.computed_tokens for state in states)
    again = 2 * len(items) if first == "n" else 0  # each sample has the last token's logits computed for itself
    assert computed == best + again


def test_cache_computes_the_constant_beginning_ahead(exact):
    exact.client.flush_cache()
    judge = program("gen")
    ahead = judge.cache(exact)
    assert ahead > 40 and judge.cache(exact) <= 1
    state = judge.run("seven", backend=exact, temperature=0, max_tokens=1)
    assert state.usage.cached_tokens >= ahead - 1
