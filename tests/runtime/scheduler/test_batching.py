"""Chunked prefill, admission and retraction."""

from __future__ import annotations

from fake_engine import (
    finish_order,
    generate,
    make_engine_loop,
    post,
    run_until_idle,
)

from plait.runtime.messages import Append, Open


def test_prefill_is_chunked_beside_decoding_requests():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=10)
    run_until_idle(engine_loop, transport, Open(1), Append(1, [1, 2]))
    post(transport, generate(1, 1, 30, ignore_eos=True))
    for _ in range(3):
        engine_loop.step(0.0)
    post(transport, Open(2), Append(2, [3] * 50), generate(2, 2, 1))
    run_until_idle(engine_loop, transport)
    mixed = [rows for rows in runner.batches if len(rows) == 2]
    assert mixed, "no step had both"
    assert all(sum(count for _, count in rows) <= 10 for rows in runner.batches)
    assert all(min(count for _, count in rows) == 1 for rows in mixed), "the decoding row was left out"


def test_a_decoding_request_is_in_every_step_of_another_prefill():
    engine_loop, transport, runner = make_engine_loop(batch_tokens=10)
    post(transport, Open(1), Append(1, [1, 2]), generate(1, 1, 40, ignore_eos=True))
    engine_loop.step(0.0)
    post(transport, Open(2), Append(2, [3] * 50), generate(2, 2, 1))
    runner.batches.clear()
    engine_loop.step(0.0)
    while engine_loop.sessions._sessions[b"c", 2].active_call:
        engine_loop.step(0.0)
    assert len(runner.batches) == 6, "50 tokens at 9 a step"
    assert all(len(rows) == 2 and min(count for _, count in rows) == 1 for rows in runner.batches)


def test_retraction_does_not_change_outputs():
    def run(pages):
        engine_loop, transport, _ = make_engine_loop(pages=pages, batch_tokens=64, rows=8)
        requests = []
        for i in range(8):
            requests += [
                Open(i),
                Append(i, [1 + i % 3, 2, 3]),
                generate(i, i, 60, ignore_eos=True, temperature=1.0, seed=i),
            ]
        return run_until_idle(engine_loop, transport, *requests), engine_loop

    small, engine_loop = run(100)
    large, _ = run(4000)
    assert engine_loop.batch_scheduler.num_retractions > 0
    assert {i: c.tokens for i, c in small.items()} == {i: c.tokens for i, c in large.items()}
    assert sum(c.end.usage.recomputed_tokens for c in small.values()) > 0
    assert all(c.end.usage.recomputed_tokens == 0 for c in large.values())


def test_the_oldest_request_is_never_retracted():
    engine_loop, transport, _ = make_engine_loop(pages=100, batch_tokens=64, rows=8)
    requests = []
    for i in range(8):
        requests += [Open(i), Append(i, [1 + i % 3, 2, 3]), generate(i, i, 60, ignore_eos=True)]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert engine_loop.batch_scheduler.num_retractions > 0
    assert calls[0].end.usage.recomputed_tokens == 0
    assert finish_order(transport)[0] == 0


def test_a_prompt_waits_until_there_are_pages_for_it():
    engine_loop, transport, _ = make_engine_loop(pages=100, batch_tokens=64)
    requests = []
    for i in range(4):
        requests += [Open(i), Append(i, [1 + i] * 60), generate(i, i, 5)]
    run_until_idle(engine_loop, transport, *requests)
    assert engine_loop.batch_scheduler.num_retractions == 0
