"""Extra steps for tenants with few rows: how long their calls and those of others take when small steps are cheap."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from fake_engine import generate, greedy, make_engine_loop, outcomes, post, run_until_idle

from plait.runtime.messages import Append, Open
from plait.runtime.scheduler.policy import batching, light_tenants


def call(number, tenant, max_tokens):
    return [Open(number, tenant), Append(number, prompt(number)), generate(number, number, max_tokens, ignore_eos=True)]


def prompt(number):
    return [1 + number % 50] * 4


class TimedLoop:
    """An engine loop whose steps take `base_s` and `row_s` for each token. rows: of each step, by tenant."""

    def __init__(self, monkeypatch, base_s=0.01, row_s=0.002, **settings):
        self.now, self.base_s, self.row_s = 1000.0, base_s, row_s
        monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.loop, self.transport, _ = make_engine_loop(prompt_lookup=False, pages=8192, batch_tokens=256, **settings)
        self.rows = []
        next_batch = self.loop.batch_scheduler.next_batch

        def recorded():
            batch = next_batch()
            self.rows.append(
                Counter(row.request.owner.tenant for row in batch.rows) if batch is not None else Counter()
            )
            return batch

        monkeypatch.setattr(self.loop.batch_scheduler, "next_batch", recorded)

    def post(self, *calls):
        post(self.transport, *(message for one in calls for message in one))

    def run(self, seconds):
        """The tokens of each tenant's calls in that time. Call numbers of b begin at 1000."""
        before, end = self.tokens(), self.now + seconds
        while self.now < end:
            self.step()
        return self.tokens() - before

    def run_until_end(self, number):
        """The seconds until a call has ended."""
        start = self.now
        while number not in outcomes(self.transport) or outcomes(self.transport)[number].end is None:
            self.step()
        return self.now - start

    def step(self):
        num_tokens = self.loop.num_computed_tokens
        self.loop.step(0.0)
        self.now += self.base_s + self.row_s * (self.loop.num_computed_tokens - num_tokens)

    def tokens(self):
        served = Counter()
        for number, result in outcomes(self.transport).items():
            served["ab"[number >= 1000]] += len(result.tokens)
        return served


@pytest.fixture
def timed(monkeypatch):
    return lambda **settings: TimedLoop(monkeypatch, **settings)


def without_extra_steps(loop):
    loop.loop.batch_scheduler._light_tenants = None
    return loop


def beside_a_full_house(loop):
    """The seconds of 16 tokens of b beside calls of a on all rows, and the number of steps."""
    loop.post(*(call(i, "a", 900) for i in range(32)))
    loop.run(3.0)
    loop.rows.clear()
    loop.post(call(1000, "b", 16))
    return loop.run_until_end(1000)


def test_few_tokens_beside_many_rows_come_in_extra_steps(timed):
    seconds = beside_a_full_house(loop := timed(rows=32))
    assert seconds < 0.7 * beside_a_full_house(without_extra_steps(timed(rows=32)))
    extra = [rows for rows in loop.rows if set(rows) == {"b"}]
    assert len(extra) >= 7
    assert all(set(rows) != {"b"} for rows, after in zip(loop.rows, loop.rows[1:], strict=False) if set(after) == {"b"})


def test_extra_steps_leave_nine_tenths_of_the_throughput(timed):
    """A call of b that lasts; what is saved up lasts for two seconds."""

    def throughput(loop):
        loop.post(*(call(i, "a", 4000) for i in range(31)), call(1000, "b", 4000))
        loop.run(3.0)
        return loop.run(10.0)

    served, plain = throughput(timed(rows=32)), throughput(without_extra_steps(timed(rows=32)))
    assert served["b"] > 1.25 * plain["b"]
    assert served["a"] > 0.89 * plain["a"]


@pytest.mark.parametrize("num_tenants", [8, 24])
def test_tenants_with_equal_parts_have_no_extra_steps(timed, num_tenants):
    """Also where more tenants than rows take turns."""
    loop = timed(rows=16)
    loop.post(*(call(i, f"t{i % num_tenants}", 60) for i in range(48)))
    loop.run(3.0)
    assert min(rows.total() for rows in loop.rows) >= 16 - 8, "rows are free for a step where calls end"


def test_a_device_whose_small_steps_are_not_cheap_has_hardly_any(timed):
    beside_a_full_house(loop := timed(rows=32, base_s=0.07, row_s=0.0))
    loop.run(15.0)
    assert sum(set(rows) == {"b"} for rows in loop.rows) <= 1 + 16 / light_tenants.RETRY_S


def test_a_pause_in_an_extra_step_is_no_debt(timed):
    """Such as that of a process that was stopped for an hour."""
    loop = timed(rows=32)
    loop.post(*(call(i, "a", 4000) for i in range(31)), call(1000, "b", 4000))
    while not loop.rows or set(loop.rows[-1]) != {"b"}:
        loop.step()
    loop.now += 3600.0
    loop.rows.clear()
    loop.run(2 * light_tenants.RETRY_S)
    assert sum(set(rows) == {"b"} for rows in loop.rows) > 20


def test_outputs_do_not_change(timed):
    loop = timed(rows=16)
    loop.post(*(call(i, "a", 70) for i in range(20)), call(1000, "b", 40), call(1001, "b", 40))
    calls = run_until_idle(loop.loop, loop.transport)
    assert all(calls[i].tokens == greedy(prompt(i), len(calls[i].tokens), ignore_eos=True) for i in calls)
    assert [len(calls[i].tokens) for i in (0, 19, 1000, 1001)] == [70, 70, 40, 40]
