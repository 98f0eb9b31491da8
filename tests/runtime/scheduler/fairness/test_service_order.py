"""The order in which the engine loop serves programs and tenants."""

from __future__ import annotations

from fake_engine import (
    finish_order,
    generate,
    make_engine_loop,
    post,
    run_until_idle,
)

from plait.runtime.messages import Append, Open
from plait.runtime.scheduler.policy import fairness


def test_a_short_program_does_not_wait_behind_a_long_one():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    requests = []
    for i in range(6):  # one program, many long calls that arrived first
        requests += [Open(i, program=1), Append(i, [1 + i] * 50), generate(i, i, 400, ignore_eos=True)]
    requests += [Open(50, program=50), Append(50, [60, 61]), generate(50, 50, 2, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert finish_order(transport).index(50) <= 1


def test_tenants_share_by_tokens_not_by_requests():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    requests = []
    for i in range(12):
        requests += [Open(i, tenant="greedy"), Append(i, [1 + i] * 50), generate(i, i, 300, ignore_eos=True)]
    for i in range(20, 23):
        requests += [Open(i, tenant="modest"), Append(i, [40 + i] * 2), generate(i, i, 300, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert max(finish_order(transport).index(i) for i in range(20, 23)) <= 6


def test_among_equal_requests_the_longest_cached_prefix_is_first():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    run_until_idle(engine_loop, transport, Open(0), Append(0, [7] * 40), generate(0, 0, 1))
    transport.outbox.clear()
    requests = []
    for i, prompt in enumerate(([9] * 40, [8] * 40, [7] * 40), start=1):
        requests += [Open(i), Append(i, prompt), generate(i, i, 1, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert finish_order(transport)[0] == 3


def test_starving_requests_of_one_tenant_do_not_precede_another_tenant(monkeypatch):
    monkeypatch.setattr(fairness, "STARVATION_S", 0.0)
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    requests = []
    for i in range(12):
        requests += [Open(i, tenant="greedy"), Append(i, [1 + i] * 50), generate(i, i, 300, ignore_eos=True)]
    requests += [Open(20, tenant="modest"), Append(20, [40]), generate(20, 20, 3, ignore_eos=True)]
    run_until_idle(engine_loop, transport, *requests)
    assert finish_order(transport).index(20) <= 1


def test_a_returning_tenant_is_not_always_first():
    """Recent service is remembered while a tenant is away."""
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    post(transport, Open(1, "busy"), Append(1, [1] * 600), generate(1, 1, 1))
    post(transport, Open(2, "other"), Append(2, [2] * 900), generate(2, 2, 1))
    for _ in range(13):
        engine_loop.step(timeout_s=0.0)
    post(transport, Open(3, "busy"), Append(3, [3] * 600), generate(3, 3, 1))
    post(transport, Open(4, "other"), Append(4, [1, 2] * 5), generate(4, 4, 1))
    post(transport, Open(5, "third"), Append(5, [1, 3] * 5), generate(5, 5, 1))
    run_until_idle(engine_loop, transport)
    ends = finish_order(transport)
    assert ends.index(5) < ends.index(3), ends
