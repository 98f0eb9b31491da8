"""Background requests: behind all others in order, rows and pages, and with the same output."""

from __future__ import annotations

import pytest
from fake_engine import finish_order, generate, greedy, make_engine_loop, post, run_until_idle

from plait.runtime.messages import Append, Open

ORDERS = ["fair", "first-come"]


def call(number, prompt, count=1, **opened):
    return [Open(number, **opened), Append(number, prompt), generate(number, number, count, ignore_eos=True)]


def is_background(request):
    return request.owner.is_background


@pytest.mark.parametrize("order", ORDERS)
def test_they_run_behind_others_of_any_tenant_and_priority(order):
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64, order=order)
    run_until_idle(engine_loop, transport, *call(99, [5] * 60, 200, tenant="a"))  # so much service sets "a" back
    transport.outbox.clear()
    requests = []
    for i in range(4):
        requests += call(i, [1 + i] * 10, 2, background=True, priority=1000, tenant="b")
    requests += call(10, [9] * 10, 2, tenant="a", priority=-1000)
    run_until_idle(engine_loop, transport, *requests)
    assert finish_order(transport)[0] == 10


@pytest.mark.parametrize("order", ORDERS)
def test_a_full_batch_gives_its_rows_to_others_and_continues_unchanged(order):
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=4, batch_tokens=64, order=order)
    prompts = {i: [1 + i] * 10 for i in range(4)}
    post(transport, *(message for i in prompts for message in call(i, prompts[i], 100, background=True)))
    for _ in range(10):
        engine_loop.step(0.0)
    assert len(engine_loop.batch_scheduler.running) == 4, "all rows, while there is nothing else"
    others = {i: [20 + i] * 5 for i in range(10, 16)}
    post(transport, *(message for i in others for message in call(i, others[i], 20)))
    engine_loop.step(0.0)
    assert [is_background(request) for request in engine_loop.batch_scheduler.running].count(True) <= 1
    calls = run_until_idle(engine_loop, transport)
    assert set(finish_order(transport)[:6]) == set(others)
    for i, prompt in (prompts | others).items():
        assert calls[i].tokens == greedy(prompt, len(calls[i].tokens), ignore_eos=True)
    assert all(calls[i].end.usage.recomputed_tokens == 0 for i in prompts), "paused requests keep their pages"


def test_beside_one_request_they_have_a_quarter_of_the_rows():
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=8, batch_tokens=64)
    scheduler = engine_loop.batch_scheduler
    post(transport, *(message for i in range(8) for message in call(i, [1 + i] * 10, 100, background=True)))
    for _ in range(6):
        engine_loop.step(0.0)
    post(transport, *call(10, [50] * 10, 30))
    engine_loop.step(0.0)
    assert [is_background(request) for request in scheduler.running] == [True, True, False]
    num_pauses = scheduler.num_pauses
    for _ in range(20):
        engine_loop.step(0.0)
    assert [is_background(request) for request in scheduler.running].count(True) == 2
    assert scheduler.num_pauses == num_pauses, "none is admitted to be paused again"
    run_until_idle(engine_loop, transport)


def test_a_waiting_request_gets_their_pages():
    engine_loop, transport, _ = make_engine_loop(pages=220, rows=4, batch_tokens=64, prompt_lookup=False)
    post(transport, *call(0, [1] * 120, 80, background=True))
    for _ in range(12):
        engine_loop.step(0.0)
    calls = run_until_idle(engine_loop, transport, *call(10, [50] * 150, 10))
    assert finish_order(transport) == [10, 0] and engine_loop.batch_scheduler.num_pauses > 0
    assert calls[10].end.usage.recomputed_tokens == 0
    assert calls[0].tokens == greedy([1] * 120, 80, ignore_eos=True)


@pytest.mark.parametrize("pages", range(108, 112))  # whichever request of a step finds no page first
def test_running_requests_take_their_pages_first(monkeypatch, pages):
    engine_loop, transport, _ = make_engine_loop(pages=pages, rows=8, batch_tokens=64, prompt_lookup=False)
    scheduler, retracted = engine_loop.batch_scheduler, []
    retract = scheduler.retract
    monkeypatch.setattr(
        scheduler, "retract", lambda request: (retracted.append(is_background(request)), retract(request))
    )
    prompts = {0: [1] * 10, 1: [2] * 10, 2: [3] * 10}
    post(transport, *call(1, prompts[1], 40, background=True))
    for _ in range(3):
        engine_loop.step(0.0)
    calls = run_until_idle(engine_loop, transport, *call(0, prompts[0], 40), *call(2, prompts[2], 40))
    assert retracted and all(retracted) and finish_order(transport)[-1] == 1
    assert calls[0].end.usage.recomputed_tokens == calls[2].end.usage.recomputed_tokens == 0
    for i, prompt in prompts.items():
        assert calls[i].tokens == greedy(prompt, 40, ignore_eos=True)


def test_a_long_prompt_takes_a_part_of_each_step_beside_others():
    engine_loop, transport, runner = make_engine_loop(rows=4, batch_tokens=32, pages=4096)
    post(transport, *call(1, [1, 2], 40))
    engine_loop.step(0.0)
    post(transport, *call(2, [3] * 400, 1, background=True))
    runner.batches.clear()
    run_until_idle(engine_loop, transport)
    beside = [rows for rows in runner.batches if len(rows) == 2]
    alone = [rows for rows in runner.batches if len(rows) == 1 and rows[0][1] > 1]
    assert len(beside) > 30 and all(max(count for _, count in rows) <= 4 for rows in beside)
    assert max(count for rows in alone for _, count in rows) == 32, "the whole step, once there is nothing else"


def test_their_service_is_counted_apart():
    """A tenant that has computed much in the background is served as one that has computed nothing."""
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64, pages=4096)
    beside = [*call(5, [9] * 20, 50, tenant="c", background=True), *call(6, [9] * 20, 20, tenant="c")]
    a_and_b = [*call(1, [7] * 50, 50, tenant="a", background=True), *call(2, [8] * 20, 20, tenant="b")]
    run_until_idle(engine_loop, transport, *a_and_b, *beside)
    transport.outbox.clear()
    run_until_idle(engine_loop, transport, *call(3, [5] * 9, 2, tenant="b"), *call(4, [6] * 9, 2, tenant="a"))
    assert finish_order(transport) == [4, 3]


def test_after_a_failed_step_both_kinds_are_computed_again(capsys):
    engine_loop, transport, runner = make_engine_loop(pages=4096, rows=8, batch_tokens=64)
    prompts = {0: [1] * 50, 1: [2] * 50, 2: [3] * 50}
    post(transport, *call(0, prompts[0], 5, background=True), *call(1, prompts[1], 5), *call(2, prompts[2], 5))
    runner.fail_when = lambda batch: len(batch.rows) > 1
    calls = run_until_idle(engine_loop, transport)
    assert "Traceback" in capsys.readouterr().err
    for i, prompt in prompts.items():
        assert calls[i].tokens == greedy(prompt, 5, ignore_eos=True)
