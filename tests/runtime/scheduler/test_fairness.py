"""Fairness between tenants and programs, and prefix sharing among waiting requests, with a clock that tests move."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import finish_order, greedy, make_engine_loop, post, run_until_idle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.runtime.batch.request import Request, RequestOwner
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler import batching, fairness


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


# -- shared prefixes ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=16),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(0, 3),
)
@example(
    [[2, 2], [2, 2], [2]], 2, 2, 2
)  # one request computes the last token of another in the same step, and continues
def test_prefixes_shared_by_waiting_requests_are_computed_once(paths, batch_tokens, rows, late):
    """As many tokens are computed as the tree of the prompts has, plus the last one of each request again."""
    runs = np.random.default_rng(3).integers(1, 40, size=(4, 11)).tolist()
    prompts = [[t for run in path for t in runs[run]] for path in paths]
    engine_loop, transport, runner = make_engine_loop(pages=4096, batch_tokens=batch_tokens, rows=rows)
    for i, prompt in enumerate(prompts[late:]):
        post(transport, *program_call(100 + i, prompt))
    engine_loop.step(0.0)
    calls = run_until_idle(
        engine_loop, transport, *(message for i, p in enumerate(prompts[:late]) for message in program_call(i, p))
    )
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert len(prefixes) <= runner.num_computed <= len(prefixes) + len(prompts)
    assert all(calls[i].tokens == greedy(p, 1, ignore_eos=True) for i, p in enumerate(prompts[:late]))


def test_the_children_of_a_fork_run_in_one_batch():
    """Although unrelated requests arrived before them."""
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64, rows=8)
    trunk = [5] * 30
    run_until_idle(engine_loop, transport, *program_call(1, trunk))
    children = list(range(10, 18))
    runner.batches.clear()
    strangers = [message for i in range(50, 54) for message in program_call(i, [40 + i % 4] * 30)]
    branches = [message for c in children for message in (Append(c, [c]), gen(c, c, 4))]
    run_until_idle(engine_loop, transport, *strangers, Fork(1, children), *branches)
    fresh = [batch for batch in runner.batches if any(count > 1 for _, count in batch)]
    first = fresh[0]
    assert len(first) == 8 and all(start >= 30 for start, _ in first), (
        "the children are scheduled together and before the others"
    )
    together = [batch for batch in runner.batches if len(batch) == 8 and all(count == 1 for _, count in batch)]
    assert len(together) >= 3, "and they decode together"


# -- starvation --------------------------------------------------------------------------------------------


def test_requests_with_cached_prefixes_do_not_starve_another(clock):
    """Among requests over a cached text, one without cached prefix waits until it starves, not longer."""
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    run_until_idle(engine_loop, transport, *program_call(0, [7] * 40))
    transport.outbox.clear()
    post(transport, *program_call(1, [9] * 40))
    for i in range(2, 40):
        post(transport, *program_call(i, [*[7] * 40, i]))
        if i == 20:
            assert 1 not in finish_order(transport), "with one row, the requests with cached prefixes go first"
            clock.ahead = 2 * fairness.STARVATION_S
        engine_loop.step(0.0)
    assert 1 in finish_order(transport)
    run_until_idle(engine_loop, transport)


@pytest.mark.parametrize("order", ["fair", "first-come"])
def test_a_short_program_interrupts_long_running_calls(order, small_tiers):
    """If calls with much service take every row, they are paused. Their outputs do not change."""
    engine_loop, transport, runner = make_engine_loop(
        pages=4096, rows=2, batch_tokens=32, order=order, prompt_lookup=False
    )
    longs = {i: [1 + i] * 20 for i in (1, 2)}
    post(transport, *(message for i, prompt in longs.items() for message in program_call(i, prompt, 300)))
    for _ in range(120):
        engine_loop.step(0.0)
    before = runner.num_computed
    calls = run_until_idle(
        engine_loop, transport, *(message for i in range(10, 14) for message in program_call(i, [30, i], 5))
    )
    shorts_first = set(finish_order(transport)[:4]) == set(range(10, 14))
    assert shorts_first == (order == "fair")
    assert (engine_loop.batch_scheduler.num_pauses > 0) == (order == "fair")
    for i, prompt in longs.items():
        assert calls[i].tokens == greedy(prompt, 300, ignore_eos=True)
        assert calls[i].end.usage.recomputed_tokens == 0, "the pages of paused calls are still there"
    assert runner.num_computed - before <= 2 * 300 + 4 * 7, "pausing computes no token again"


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


def test_a_paused_call_continues_when_it_starves(small_tiers, clock):
    """In an endless stream of short programs, the paused call gets its turn and is then protected for a while."""
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


# -- tenants ------------------------------------------------------------------------------------------------

MAX_COST = 40  # tokens served at once
# How far a counter may be ahead: one service, one level within a rank, one level that a returning tenant keeps.
MAX_GAP = MAX_COST + 2 * fairness.LEVEL_TOKENS


class TenantSimulation:
    """Tenants that come and go. Each service goes to the request that `Fairness` ranks first."""

    def __init__(self):
        self.fairness, self.requests, self.served = fairness.Fairness(), {}, {}

    def come(self, name):
        owner = RequestOwner(tenant=name, program_id=(name.encode(), 0), priority=0)
        request = Request(owner, Sequence((name, "")), 0, 0)
        request.metrics.arrival_time = 0.0
        self.fairness.add(request)
        self.requests.setdefault(name, []).append(request)
        self.served.setdefault(name, 0)

    def go(self, name):
        self.fairness.remove(self.requests[name].pop())
        if not self.requests[name]:
            del self.requests[name]

    def serve(self, tokens):
        waiting = [request for requests in self.requests.values() for request in requests]
        request = min(waiting, key=lambda r: (self.fairness.rank(r, 0.0), r.arrival_index), default=None)
        if request is not None:
            self.fairness.charge(request, tokens, 0.0)
            self.served[request.owner.tenant] += tokens

    @property
    def counters(self):
        return [tenant.served for tenant in self.fairness._tenants.values()]


events = st.tuples(st.sampled_from("abcd"), st.sampled_from(["come", "come", "go", "serve"]), st.integers(1, MAX_COST))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(events, st.integers(1, 30)), min_size=1, max_size=40))
def test_no_tenant_gets_more_service_than_one_that_always_waits(script):
    """The bound of the VTC paper: while tenant b has work, a tenant a gets at most a bounded number of tokens more
    than b, however often a comes and goes. So the counters of all tenants with work stay close together."""
    simulation, since = TenantSimulation(), {}  # since: all tenants' service when this tenant's requests began to wait
    for (name, what, tokens), times in script:
        for _ in range(times):
            if what == "come" and len(simulation.requests.get(name, ())) < 3:
                simulation.come(name)
                since.setdefault(name, dict(simulation.served))
            elif what == "go" and name in simulation.requests:
                simulation.go(name)
                if name not in simulation.requests:
                    del since[name]
            elif what == "serve":
                simulation.serve(tokens)
            assert not simulation.counters or max(simulation.counters) - min(simulation.counters) <= MAX_GAP
            for waiting, before in since.items():
                got = simulation.served[waiting] - before[waiting]
                for other, had in simulation.served.items():
                    assert had - before.get(other, 0) <= got + 2 * MAX_GAP, (
                        f"{other} got more than {waiting}, which waited"
                    )


@given(st.lists(st.integers(1, MAX_COST), min_size=1, max_size=5))
def test_a_tenant_that_returns_for_every_call_gets_its_share(costs):
    """Its counter is kept, else it would always be first; and not raised each time, else it would never be."""
    simulation = TenantSimulation()
    simulation.come("patient")
    for turn in range(1000):
        if "restless" not in simulation.requests:
            simulation.come("restless")
        before = simulation.served["restless"]
        simulation.serve(costs[turn % len(costs)])
        if simulation.served["restless"] > before:
            simulation.go("restless")
    assert abs(simulation.served["restless"] - simulation.served["patient"]) <= 2 * MAX_GAP


def test_a_new_tenant_of_an_idle_runtime_has_no_credit():
    """It starts at the counter of the tenant that left last; else it would be first until it caught up."""
    simulation = TenantSimulation()
    simulation.come("old")
    for _ in range(1000):
        simulation.serve(MAX_COST)
    simulation.go("old")
    simulation.come("new")
    simulation.come("old")
    for _ in range(100):
        simulation.serve(MAX_COST)
    assert simulation.served["new"] <= 50 * MAX_COST + MAX_GAP


def test_the_number_of_remembered_inactive_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(fairness, "MAX_INACTIVE_TENANTS", 10)
    simulation = TenantSimulation()
    for number in range(50):
        simulation.come(str(number))
        simulation.serve(MAX_COST)
        simulation.go(str(number))
    assert len(simulation.fairness._inactive_tenants) == 10 and not simulation.fairness._tenants
