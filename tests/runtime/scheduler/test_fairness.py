"""Who goes first, and what is computed once: counters over the chain model, with a clock that the test moves."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import greedy, make_engine_loop, run_until_idle
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.runtime.batch.request import Request, RequestOwner
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import Append, Finished, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler import batching, fairness


def gen(session, call, n=1):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True))


def asked(number, prompt, n=1, program=0):
    return [Open(number, program=program or 1000 + number), Append(number, list(prompt)), gen(number, number, n)]


def post(transport, *requests):
    transport.inbox += [(b"c", request) for request in requests]


def ends(transport):
    return [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]


@pytest.fixture
def small_tiers(monkeypatch):
    """Levels and tiers that short texts reach."""
    monkeypatch.setattr(fairness, "LEVEL_TOKENS", 16)
    monkeypatch.setattr(fairness, "TIER_TOKENS", 64)


@pytest.fixture
def clock(monkeypatch):
    """The policy's clock; `clock.ahead` seconds ahead of the machine's."""
    ahead = SimpleNamespace(ahead=0.0)
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead.ahead))
    return ahead


# -- computed once ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=16),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(0, 3),
)
@example([[2, 2], [2, 2], [2]], 2, 2, 2)  # one computes its neighbour's last token beside it, and goes on
def test_what_waiting_requests_share_goes_through_the_model_once(paths, batch_tokens, rows, late):
    """Prompts of a few common runs: as many tokens are computed as their tree has, and each row's last again."""
    runs = np.random.default_rng(3).integers(1, 40, size=(4, 11)).tolist()
    prompts = [[t for run in path for t in runs[run]] for path in paths]
    engine_loop, transport, runner = make_engine_loop(pages=4096, batch_tokens=batch_tokens, rows=rows)
    for i, prompt in enumerate(prompts[late:]):
        post(transport, *asked(100 + i, prompt))
    engine_loop.step(0.0)
    calls = run_until_idle(
        engine_loop, transport, *(each for i, p in enumerate(prompts[:late]) for each in asked(i, p))
    )
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert len(prefixes) <= runner.num_computed <= len(prefixes) + len(prompts)
    assert all(calls[i].tokens == greedy(p, 1, ignore_eos=True) for i, p in enumerate(prompts[:late]))


def test_fork_siblings_are_in_one_batch():
    """The children of a fork, and no stranger between them, although strangers came first."""
    engine_loop, transport, runner = make_engine_loop(batch_tokens=64, rows=8)
    trunk = [5] * 30
    run_until_idle(engine_loop, transport, *asked(1, trunk))
    children = list(range(10, 18))
    runner.batches.clear()
    strangers = [each for i in range(50, 54) for each in asked(i, [40 + i % 4] * 30)]
    branches = [each for c in children for each in (Append(c, [c]), gen(c, c, 4))]
    run_until_idle(engine_loop, transport, *strangers, Fork(1, children), *branches)
    fresh = [batch for batch in runner.batches if any(count > 1 for _, count in batch)]
    first = fresh[0]
    assert len(first) == 8 and all(start >= 30 for start, _ in first), "the siblings go together and before the others"
    together = [batch for batch in runner.batches if len(batch) == 8 and all(count == 1 for _, count in batch)]
    assert len(together) >= 3, "and they decode together"


# -- nobody starves -----------------------------------------------------------------------------------------


def test_the_longest_prefix_does_not_starve_another(clock):
    """A stream of requests over a cached text; one stranger among them waits until its time has come, and no longer."""
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64)
    run_until_idle(engine_loop, transport, *asked(0, [7] * 40))
    transport.outbox.clear()
    post(transport, *asked(1, [9] * 40))
    for i in range(2, 40):
        post(transport, *asked(i, [*[7] * 40, i]))
        if i == 20:
            assert 1 not in ends(transport), "with a row for one, the cached ones go first"
            clock.ahead = 2 * fairness.STARVATION_S
        engine_loop.step(0.0)
    assert 1 in ends(transport)
    run_until_idle(engine_loop, transport)


@pytest.mark.parametrize("order", ["fair", "first-come"])
def test_a_short_program_goes_before_a_long_call_that_runs(order, small_tiers):
    """With every row taken by calls that were served much, they are paused; the answers stay what they were."""
    engine_loop, transport, runner = make_engine_loop(
        pages=4096, rows=2, batch_tokens=32, order=order, prompt_lookup=False
    )
    longs = {i: [1 + i] * 20 for i in (1, 2)}
    post(transport, *(each for i, prompt in longs.items() for each in asked(i, prompt, 300)))
    for _ in range(120):
        engine_loop.step(0.0)
    before = runner.num_computed
    calls = run_until_idle(engine_loop, transport, *(each for i in range(10, 14) for each in asked(i, [30, i], 5)))
    shorts_first = set(ends(transport)[:4]) == set(range(10, 14))
    assert shorts_first == (order == "fair")
    assert (engine_loop.batch_scheduler.num_pauses > 0) == (order == "fair")
    for i, prompt in longs.items():
        assert calls[i].tokens == greedy(prompt, 300, ignore_eos=True)
        assert calls[i].end.usage.recomputed_tokens == 0, "what was paused is still there"
    assert runner.num_computed - before <= 2 * 300 + 4 * 7, "pausing costs no token"


def test_a_short_prompt_goes_before_the_rest_of_a_long_one(small_tiers):
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=4, batch_tokens=16)
    post(transport, *asked(1, np.arange(900) % 50 + 1), *asked(2, np.arange(990) % 49 + 1))
    for _ in range(6):
        engine_loop.step(0.0)
    post(transport, *asked(3, [60] * 10))
    engine_loop.step(0.0)
    assert ends(transport) == [3]
    run_until_idle(engine_loop, transport)
    assert ends(transport) == [3, 1, 2], "two long ones do not take turns"


def test_a_paused_call_comes_back_in_time(small_tiers, clock):
    """Short programs without end: the long call gets its turn, and is left alone for a while."""
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=1, batch_tokens=32, prompt_lookup=False)
    post(transport, *asked(1, [1] * 20, 400))
    for _ in range(120):
        engine_loop.step(0.0)
    (session,) = engine_loop.sessions._sessions.values()
    number = 10

    def busy(steps):
        nonlocal number
        for _ in range(steps):
            if len(engine_loop.batch_scheduler.waiting) < 3:
                number += 1
                post(transport, *asked(number, [2 + number % 50, 60], 3))
            engine_loop.step(0.0)
        return len(session.seq)

    first = busy(40)
    assert busy(40) == first, "the short ones have the row"
    clock.ahead = 3600.0
    assert busy(40) >= first + 30, "now it is its turn, and new ones have to wait"
    clock.ahead += 2 * fairness.STARVATION_S
    later = busy(10)
    assert busy(20) == later, "and then theirs again"


def test_a_program_is_charged_for_all_its_calls():
    """Many short calls of one long program do not hold up a program that had little."""
    engine_loop, transport, _ = make_engine_loop(pages=4096, rows=2, batch_tokens=64)
    post(transport, *(each for i in range(1, 41) for each in asked(i, [i, 50], 20, program=7)))
    for _ in range(200):
        engine_loop.step(0.0)
    done = len(ends(transport))
    run_until_idle(engine_loop, transport, *asked(99, [60], 2))
    assert done < 30 and ends(transport).index(99) <= done + 2


def test_first_come_is_by_arrival_alone():
    engine_loop, transport, _ = make_engine_loop(rows=1, batch_tokens=64, order="first-come")
    run_until_idle(engine_loop, transport, *asked(0, [7] * 40))
    transport.outbox.clear()
    run_until_idle(
        engine_loop, transport, *(each for i in range(1, 5) for each in asked(i, [7] * 40 if i == 4 else [i] * 40))
    )
    assert ends(transport) == [1, 2, 3, 4], "neither a cached prefix nor a program's account counts"


# -- tenants ------------------------------------------------------------------------------------------------

COST = 40  # most tokens of one turn
GAP = COST + 2 * fairness.LEVEL_TOKENS  # what a counter may be ahead: a turn, what a rank does not tell, what is kept


class Turns:
    """Tenants that come and go at one `Fairness`, which serves a row of whom it ranks first."""

    def __init__(self):
        self.fairness, self.rows, self.served = fairness.Fairness(), {}, {}

    def come(self, name):
        owner = RequestOwner(tenant=name, program_id=(name.encode(), 0), priority=0)
        request = Request(owner, Sequence((name, "")), 0, 0)
        request.metrics.arrival_time = 0.0
        self.fairness.add(request)
        self.rows.setdefault(name, []).append(request)
        self.served.setdefault(name, 0)

    def go(self, name):
        self.fairness.remove(self.rows[name].pop())
        if not self.rows[name]:
            del self.rows[name]

    def serve(self, tokens):
        everybody = [request for rows in self.rows.values() for request in rows]
        request = min(everybody, key=lambda each: (self.fairness.rank(each, 0.0), each.arrival_index), default=None)
        if request is not None:
            self.fairness.charge(request, tokens, 0.0)
            self.served[request.owner.tenant] += tokens

    @property
    def counters(self):
        return [tenant.served for tenant in self.fairness._tenants.values()]


events = st.tuples(st.sampled_from("abcd"), st.sampled_from(["come", "come", "go", "serve"]), st.integers(1, COST))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(events, st.integers(1, 30)), min_size=1, max_size=40))
def test_no_tenant_gets_more_than_one_that_waits_all_along(script):
    """The bounds of the VTC paper: over any time in which b has work, a has at most a bounded number of tokens more,
    however a comes and goes; so the counters of all that have work stay together."""
    turns, since = Turns(), {}  # since: what everybody had when the tenant's rows began to wait without a break
    for (name, what, tokens), times in script:
        for _ in range(times):
            if what == "come" and len(turns.rows.get(name, ())) < 3:
                turns.come(name)
                since.setdefault(name, dict(turns.served))
            elif what == "go" and name in turns.rows:
                turns.go(name)
                if name not in turns.rows:
                    del since[name]
            elif what == "serve":
                turns.serve(tokens)
            assert not turns.counters or max(turns.counters) - min(turns.counters) <= GAP
            for waiting, before in since.items():
                got = turns.served[waiting] - before[waiting]
                for other, had in turns.served.items():
                    assert had - before.get(other, 0) <= got + 2 * GAP, f"{other} had more than {waiting}, who waited"


@given(st.lists(st.integers(1, COST), min_size=1, max_size=5))
def test_a_tenant_that_returns_for_every_call_is_not_always_first(costs):
    """It owes what it owed, else it would have all the turns; and it is not lifted each time, else it had none."""
    turns = Turns()
    turns.come("patient")
    for turn in range(1000):
        if "restless" not in turns.rows:
            turns.come("restless")
        before = turns.served["restless"]
        turns.serve(costs[turn % len(costs)])
        if turns.served["restless"] > before:
            turns.go("restless")
    assert abs(turns.served["restless"] - turns.served["patient"]) <= 2 * GAP


def test_a_newcomer_to_an_idle_runtime_has_saved_up_nothing():
    """The counter of who left last is where it begins; else it would go first until it had as much as all before."""
    turns = Turns()
    turns.come("old")
    for _ in range(1000):
        turns.serve(COST)
    turns.go("old")
    turns.come("new")
    turns.come("old")
    for _ in range(100):
        turns.serve(COST)
    assert turns.served["new"] <= 50 * COST + GAP


def test_tenants_that_are_away_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(fairness, "MAX_INACTIVE_TENANTS", 10)
    turns = Turns()
    for number in range(50):
        turns.come(str(number))
        turns.serve(COST)
        turns.go(str(number))
    assert len(turns.fairness._inactive_tenants) == 10 and not turns.fairness._tenants
