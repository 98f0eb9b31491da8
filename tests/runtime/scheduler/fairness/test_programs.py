"""Service of programs by the engine loop: starvation, pauses and priorities, with a clock that tests set."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import finish_order, greedy, make_engine_loop, post, run_until_idle, vocabulary

from plait.constrained import Choices, compile_grammar
from plait.runtime.messages import Append, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.policy import batching, fairness

WORDS = Choices(("ant", "to", "zoo"))


def gen(session, call, n=1):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))


def program_call(number, prompt, n=1, program=0):
    return [Open(number, program=program or 1000 + number), Append(number, list(prompt)), gen(number, number, n)]


@pytest.fixture
def small_tiers(monkeypatch):
    """Levels and tiers small enough for short texts."""
    monkeypatch.setattr(fairness, "LEVEL_TOKENS", 16)
    monkeypatch.setattr(fairness, "TIER_TOKENS", 64)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the batch scheduler; it is `clock.ahead` seconds ahead of the real one."""
    ahead = SimpleNamespace(ahead=0.0)
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead.ahead))
    return ahead


def test_requests_with_cached_prefixes_do_not_starve_another(clock):
    """Among requests over a cached text, one without cached prefix waits until it starves, not longer."""
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    run_until_idle(engine_loop, transport, *program_call(0, [7] * 40))
    transport.outbox.clear()
    post(transport, *program_call(1, [9] * 40))
    for i in range(2, 40):
        post(transport, *program_call(i, [*[7] * 40, i]))
        if i == 20:
            assert 1 not in finish_order(transport), "with one row, requests with cached prefixes are served first"
            clock.ahead = 2 * fairness.STARVATION_S
        engine_loop.step(0.0)
    assert 1 in finish_order(transport)
    run_until_idle(engine_loop, transport)


@pytest.mark.parametrize("order", ["fair", "first-come"])
def test_a_short_program_interrupts_long_running_calls(order, small_tiers):
    """If calls with much service occupy all rows, they are paused. Their outputs do not change."""
    engine_loop, transport, runner = make_engine_loop(
        pages=4096, rows=2, batch_tokens=32, order=order, prompt_lookup=False
    )
    long_prompts = {i: [1 + i] * 20 for i in (1, 2)}
    post(transport, *(message for i, prompt in long_prompts.items() for message in program_call(i, prompt, 300)))
    for _ in range(120):
        engine_loop.step(0.0)
    before = runner.num_computed
    calls = run_until_idle(
        engine_loop, transport, *(message for i in range(10, 14) for message in program_call(i, [30, i], 5))
    )
    shorts_first = set(finish_order(transport)[:4]) == set(range(10, 14))
    assert shorts_first == (order == "fair")
    assert (engine_loop.batch_scheduler.num_pauses > 0) == (order == "fair")
    for i, prompt in long_prompts.items():
        assert calls[i].tokens == greedy(prompt, 300, ignore_eos=True)
        assert calls[i].end.usage.recomputed_tokens == 0, "paused calls keep their pages"
    assert runner.num_computed - before <= 2 * 300 + 4 * 7, "pauses recompute no token"


def test_a_short_prompt_interrupts_a_long_prefill(small_tiers):
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=4, batch_tokens=16)
    post(transport, *program_call(1, np.arange(900) % 50 + 1), *program_call(2, np.arange(990) % 49 + 1))
    for _ in range(6):
        engine_loop.step(0.0)
    post(transport, *program_call(3, [60] * 10))
    engine_loop.step(0.0)
    assert finish_order(transport) == [3]
    run_until_idle(engine_loop, transport)
    assert finish_order(transport) == [3, 1, 2], "two long prompts do not alternate"


@pytest.mark.parametrize("how", [{"particles": 2}, {"exact": True}])
def test_a_short_prompt_interrupts_the_long_one_of_a_value_drawn_as_a_whole(small_tiers, how):
    grammars = {WORDS: compile_grammar(WORDS, vocabulary())}
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=4, batch_tokens=16, grammars=grammars)
    drawn = Generate(2, 2, sampling_params(max_tokens=8, temperature=3.0, seed=1, **how), WORDS)
    prompt = (np.arange(900) % 50 + 1).tolist()
    post(transport, *program_call(1, [9, 9], 200), Open(2, program=1002), Append(2, prompt), drawn)
    for _ in range(12):
        engine_loop.step(0.0)
    post(transport, *program_call(3, [60] * 10))
    for _ in range(2):
        engine_loop.step(0.0)
    assert finish_order(transport) == [3]
    run_until_idle(engine_loop, transport)


def test_a_paused_call_continues_when_it_starves(small_tiers, clock):
    """Beside an endless stream of short programs, the paused call continues and is then protected for a while."""
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=1, batch_tokens=32, prompt_lookup=False)
    post(transport, *program_call(1, [1] * 20, 400))
    for _ in range(120):
        engine_loop.step(0.0)
    (session,) = engine_loop.sessions._sessions.values()
    number = 10

    def busy(steps):
        nonlocal number
        for _ in range(steps):
            if len(engine_loop.batch_scheduler.waiting) < 3:
                number += 1
                post(transport, *program_call(number, [2 + number % 50, 60], 3))
            engine_loop.step(0.0)
        return len(session.seq)

    first = busy(40)
    assert busy(40) == first, "the short programs have the row"
    clock.ahead = 3600.0
    assert busy(40) >= first + 30, "the starving call runs and new ones wait"
    clock.ahead += 2 * fairness.STARVATION_S
    later = busy(10)
    assert busy(20) == later, "its protection has ended"


def test_a_program_is_charged_for_all_its_calls():
    """Many short calls of one program do not delay a program with little service."""
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=2, batch_tokens=64)
    post(transport, *(message for i in range(1, 41) for message in program_call(i, [i, 50], 20, program=7)))
    for _ in range(200):
        engine_loop.step(0.0)
    done = len(finish_order(transport))
    run_until_idle(engine_loop, transport, *program_call(99, [60], 2))
    assert done < 30 and finish_order(transport).index(99) <= done + 2


def test_first_come_orders_by_arrival_only():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64, order="first-come")
    run_until_idle(engine_loop, transport, *program_call(0, [7] * 40))
    transport.outbox.clear()
    run_until_idle(
        engine_loop,
        transport,
        *(message for i in range(1, 5) for message in program_call(i, [7] * 40 if i == 4 else [i] * 40)),
    )
    assert finish_order(transport) == [1, 2, 3, 4], "neither cached prefixes nor accounts count"
