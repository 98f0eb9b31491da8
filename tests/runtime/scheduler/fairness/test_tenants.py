"""Shares of tenants in rows, tokens and pages: the real engine loop, over a clock that the tests advance.

A step takes STEP_S, whatever it computes.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from fake_engine import finish_order, generate, greedy, make_engine_loop, outcomes, post, run_until_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.messages import Abort, Append, Open
from plait.runtime.scheduler.policy import batching, fairness, waiting_order

STEP_S = 0.02
CLIENT = b"c"


def call(number, tenant, max_tokens, prompt=None, **opened):
    prompt = prompt or [1 + number % 50] * 4
    return [
        Open(number, tenant, **opened),
        Append(number, prompt),
        generate(number, number, max_tokens, ignore_eos=True),
    ]


class Simulation:
    """An engine loop. `tokens`: of each tenant, by `owner(call number)`."""

    def __init__(self, monkeypatch, owner=lambda number: "ab"[number >= 1000], **settings):
        self.now = 1000.0
        monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.loop, self.transport, self.runner = make_engine_loop(prompt_lookup=False, **settings)
        self.scheduler, self._owner = self.loop.batch_scheduler, owner

    def post(self, *calls):
        post(self.transport, *(message for one in calls for message in one))

    def steps(self, count):
        for _ in range(count):
            self.loop.step(0.0)
            self.now += STEP_S

    def rows(self):
        return Counter(request.owner.tenant for request in self.scheduler.running)

    def tokens(self):
        served = Counter()
        for number, result in outcomes(self.transport).items():
            served[self._owner(number)] += len(result.tokens)
        return served


@pytest.fixture
def simulate(monkeypatch):
    return lambda **settings: Simulation(monkeypatch, **settings)


def test_a_tenant_without_rows_gets_one_in_the_next_step(simulate):
    """40 long calls of one tenant hold all rows; the other's call takes as many steps as alone."""
    simulation = simulate(rows=16, pages=8192, batch_tokens=64)
    prompts = {i: [1 + i % 50] * 4 for i in range(40)}
    simulation.post(*(call(i, "a", 70, prompts[i]) for i in prompts))
    simulation.steps(40)
    assert simulation.rows() == {"a": 16}
    simulation.post(call(1000, "b", 16, [60, 61]))
    simulation.steps(1)
    assert simulation.rows() == {"a": 15, "b": 1}
    simulation.steps(15)
    assert finish_order(simulation.transport)[-1] == 1000
    calls = run_until_idle(simulation.loop, simulation.transport)
    for number, prompt in prompts.items():
        assert calls[number].tokens == greedy(prompt, 70, ignore_eos=True), "pauses do not change an output"
        assert calls[number].end.usage.recomputed_tokens == 0, "paused calls keep their pages"


def test_two_tenants_with_many_calls_have_half_of_the_rows_each(simulate):
    simulation = simulate(rows=16, pages=8192, batch_tokens=64)
    simulation.post(*(call(i, "a", 400) for i in range(60)))
    simulation.steps(100)
    before = simulation.tokens()["a"]
    simulation.post(*(call(1000 + i, "b", 400) for i in range(60)))
    simulation.steps(20)
    assert simulation.rows() == {"a": 8, "b": 8}
    num_pauses = simulation.scheduler.num_pauses
    simulation.steps(80)
    assert simulation.scheduler.num_pauses == num_pauses, "rows do not go to and fro"
    tokens = simulation.tokens()
    share = tokens["b"] / (tokens["b"] + tokens["a"] - before)
    assert 0.45 <= share <= 0.55, "within two seconds of its arrival"


def test_rows_are_shared_by_weight(simulate):
    simulation = simulate(rows=16, pages=8192, batch_tokens=64, tenant_weights={"b": 3.0})
    simulation.post(*(call(i, "a", 400) for i in range(40)), *(call(1000 + i, "b", 400) for i in range(40)))
    simulation.steps(30)
    assert simulation.rows() == {"a": 4, "b": 12}
    simulation.post(call(2000, "c", 10))
    simulation.steps(1)
    assert simulation.rows()["c"] == 1


def test_a_short_prompt_does_not_wait_for_the_long_prompts_of_another_tenant(simulate):
    simulation = simulate(rows=8, pages=16384, batch_tokens=32)
    simulation.post(*(call(i, "a", 4, [(i + j * j) % 60 + 1 for j in range(900)]) for i in range(16)))
    simulation.steps(5)
    simulation.post(call(1000, "b", 3, [7, 8, 9]))
    simulation.steps(4)
    assert finish_order(simulation.transport) == [1000]


def test_long_prompts_of_two_tenants_share_the_tokens_of_a_step(simulate):
    """However many prompts one of them has."""
    simulation = simulate(rows=8, pages=32768, batch_tokens=32)
    simulation.post(*(call(i, "a", 1, [(i + j * j) % 60 + 1 for j in range(900)]) for i in range(7)))
    simulation.steps(4)
    simulation.post(call(1000, "b", 1, [(3 * j + j * j) % 61 + 1 for j in range(640)]))
    simulation.steps(46)
    assert finish_order(simulation.transport)[0] == 1000, "640 tokens in steps of 32: alone 20, half of each step 40"


def test_pages_of_a_tenant_with_several_rows_go_to_one_without_rows(simulate):
    simulation = simulate(rows=16, pages=400, batch_tokens=64)
    prompts = {i: [(i + j * (1 + i)) % 60 + 1 for j in range(80)] for i in range(4)}
    simulation.post(*(call(i, "a", 50, prompts[i]) for i in prompts))
    simulation.steps(10)
    simulation.post(call(1000, "b", 5, [(5 * j + j * j) % 61 + 1 for j in range(60)]))
    simulation.steps(8)
    assert finish_order(simulation.transport) == [1000]
    calls = run_until_idle(simulation.loop, simulation.transport)
    for number, prompt in prompts.items():
        assert calls[number].tokens == greedy(prompt, 50, ignore_eos=True)


def test_a_tenant_with_one_row_keeps_it_for_a_turn(simulate):
    simulation = simulate(rows=1, pages=4096, batch_tokens=64)
    simulation.post(call(1, "a", 700))
    simulation.steps(10)
    simulation.post(call(1000, "b", 700))
    holders = []
    for _ in range(1400):
        simulation.steps(1)
        holders += simulation.rows()
    turns = [(tenant, "".join(holders).count(tenant)) for tenant in "ab"]
    assert simulation.scheduler.num_pauses <= 1400 // fairness.TURN_TOKENS + 1, turns
    assert abs(holders[:1000].count("a") - 500) <= fairness.TURN_TOKENS, "they take turns"
    assert len(finish_order(simulation.transport)) == 2


@pytest.mark.parametrize("num_tenants", [5, 12])
def test_more_tenants_than_rows_take_turns(simulate, num_tenants, monkeypatch):
    monkeypatch.setattr(fairness, "TURN_TOKENS", 32)
    simulation = simulate(rows=4, pages=10_000, batch_tokens=64, context=4096, owner=lambda number: number)
    simulation.post(*(call(i, f"tenant {i}", 800) for i in range(num_tenants)))
    simulation.steps(10 * fairness.TURN_TOKENS * num_tenants // 4)
    tokens = simulation.tokens()
    share = sum(tokens.values()) / num_tenants
    assert all(0.8 * share <= tokens[i] <= 1.2 * share for i in range(num_tenants)), tokens
    assert simulation.scheduler.num_pauses <= sum(tokens.values()) / fairness.TURN_TOKENS + 4


@pytest.mark.parametrize("pause", [0, 100])
def test_a_tenant_that_had_all_rows_before_others_came_gets_its_share(simulate, pause):
    """What it got while nobody else wanted rows is not held against it, whether or not it stopped in between."""
    num_tenants = 24
    simulation = simulate(rows=8, pages=20_000, batch_tokens=64, context=4096, owner=lambda number: number % 100)
    simulation.post(*(call(100 * i, "tenant 0", 2000) for i in range(1, 9)))
    simulation.steps(1000)
    post(simulation.transport, *(Abort(100 * i, 100 * i) for i in range(1, 9)))
    simulation.steps(1 + pause)
    before = simulation.tokens()
    simulation.post(*(call(i, f"tenant {i}", 1500) for i in range(num_tenants)))
    simulation.steps(10 * fairness.TURN_TOKENS * num_tenants // 8)
    tokens = simulation.tokens() - before
    share = sum(tokens.values()) / num_tenants
    assert all(0.8 * share <= tokens[i] <= 1.2 * share for i in range(num_tenants)), tokens


@pytest.mark.parametrize("weights", [[1.0, 0.25], [1.0, 0.1], [4.0, 1.0, 0.25], [0.5, 0.25, 0.125]])
def test_turns_are_as_long_as_weights_say(simulate, weights):
    """Three tenants of each weight on two rows, over three cycles at least."""
    tenants = {f"tenant {i}": weight for i, weight in enumerate(3 * weights)}
    simulation = simulate(rows=2, pages=4096, context=8192, tenant_weights=tenants, owner=lambda number: number)
    simulation.post(*(call(i, name, 4000) for i, name in enumerate(tenants)))
    simulation.steps(int(5 * fairness.TURN_TOKENS * sum(tenants.values()) / 2))
    tokens = simulation.tokens()
    part = sum(tokens.values()) / sum(tenants.values())
    parts = {name: tokens[i] / (part * weight) for i, (name, weight) in enumerate(tenants.items())}
    assert all(0.7 <= share <= 1.4 for share in parts.values()), parts


def test_turns_go_on_where_pages_are_few(simulate):
    """Each turn computes the whole prompt again, since the other's pages take its place."""
    simulation = simulate(rows=1, pages=700, batch_tokens=64)
    prompts = {1: [(3 * j + j * j) % 61 + 1 for j in range(400)], 1000: [(5 * j + j * j) % 59 + 1 for j in range(400)]}
    simulation.post(call(1, "a", 290, prompts[1]), call(1000, "b", 290, prompts[1000]))
    calls = run_until_idle(simulation.loop, simulation.transport, max_steps=2000)
    for number, prompt in prompts.items():
        assert calls[number].tokens == greedy(prompt, 290, ignore_eos=True)


@pytest.mark.parametrize("num_tenants", [1, 3, 200])
def test_a_step_compares_few_waiting_requests_however_many_tenants_there_are(simulate, num_tenants, monkeypatch):
    simulation = simulate(rows=4, pages=8192, batch_tokens=64)
    lengths = []
    match_length = simulation.loop.cache.match_length
    monkeypatch.setattr(simulation.loop.cache, "match_length", lambda *of: lengths.append(0) or match_length(*of))
    simulation.post(*(call(i, f"t{i % num_tenants}", 600) for i in range(600)))
    simulation.steps(3)
    assert len(simulation.scheduler.waiting) > 590
    assert len(lengths) <= 3 * waiting_order.MAX_RANKED


def test_first_come_knows_no_tenants(simulate):
    simulation = simulate(rows=2, batch_tokens=64, pages=4096, order="first-come")
    simulation.post(*(call(i, "a", 50) for i in range(6)), call(1000, "b", 2))
    simulation.steps(500)
    assert finish_order(simulation.transport)[-1] == 1000
    assert simulation.scheduler.num_pauses == 0


def test_background_calls_of_tenants_share_the_rows_of_the_background(simulate):
    simulation = simulate(rows=8, batch_tokens=64, pages=8192)
    simulation.post(call(1, "c", 900), *(call(10 + i, "a", 400, background=True) for i in range(20)))
    simulation.steps(5)
    assert simulation.rows() == {"a": 2, "c": 1}
    simulation.post(call(1000, "b", 5, background=True))
    simulation.steps(7)
    assert finish_order(simulation.transport) == [1000]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(1, 12), st.integers(1, 80), st.integers(1, 60)),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from([2, 4, 8]),
)
def test_no_waiting_tenant_is_below_another_by_two_rows(arrivals, rows):
    """While all rows are taken, a tenant that waits gets as many as any other but for one, at the latest in the step
    after the one that gives out free rows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation, number = Simulation(monkeypatch, rows=rows, pages=4096, batch_tokens=4096), 0
        prompts = {}
        for tenant, count, max_tokens, num_steps in arrivals:
            for _ in range(count):
                prompts[number] = ([1 + number % 50] * 4, max_tokens)
                simulation.post(call(number, tenant, max_tokens))
                number += 1
            late = {}
            for _ in range(num_steps):
                simulation.steps(1)
                held, waiting = simulation.rows(), {request.owner.tenant for request in simulation.scheduler.waiting}
                most = max(held.values(), default=0)
                is_full = held.total() == rows and most > 1
                late = {name: late.get(name, 0) + 1 for name in waiting if is_full and held[name] + 1 < most}
                assert all(num_late_steps < 2 for num_late_steps in late.values()), (held, waiting)
        calls = run_until_idle(simulation.loop, simulation.transport)
        for number, (prompt, max_tokens) in prompts.items():
            assert calls[number].tokens == greedy(prompt, max_tokens, ignore_eos=True)
