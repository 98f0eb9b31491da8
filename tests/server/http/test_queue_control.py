"""`QueueControl`: simulated load, and random requests compared with a slow fluid model of weighted fair queueing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.server.http.queue_control import (
    BURST_FACTOR,
    BURST_S,
    IDLE_ROWS,
    IDLE_S,
    MIN_WAITING_CALLS,
    BusyRate,
    QueueControl,
    QueuedRequest,
)

TOKENS_PER_S, ROWS, LIMIT_S = 2000, 64, 0.5


class SimulatedRuntime:
    """Computes prompts at TOKENS_PER_S in the fair order of keys, in ROWS rows, each occupied for `decode_s`."""

    def __init__(self, decode_s: float, limit_s: float = LIMIT_S, weights=None) -> None:
        self.control = QueueControl(ROWS, 512, limit_s, weights)
        self.decode_s, self.weights, self.now = decode_s, weights or {}, 0.0
        self.served: dict[str, float] = {}
        self.waiting: list = []  # (arrival time, request)
        self.running: list = []  # (end time, request)
        self.progress = 0.0  # tokens computed of the first waiting request
        self.ttft: list[tuple[float, str, float]] = []  # (arrival, key, seconds)
        self.refused: list[tuple[float, str, float]] = []

    def arrive(self, key: str, tokens: int) -> bool:
        refusal = self.control.refusal(key, self.now)
        if refusal is not None:
            self.refused.append((self.now, key, refusal.retry_after_s))
            return False
        request = self.control.admit(key, self.now)
        self.control.set_size(request, 1, 1, tokens, self.now)
        if all(other.key != key for _, other in self.waiting):
            lowest = min((self.served.get(other.key, 0) for _, other in self.waiting), default=0)
            self.served[key] = max(lowest, self.served.get(key, 0))
        self.waiting.append((self.now, request))
        return True

    def step(self, seconds: float = 0.01) -> None:
        self.now += seconds
        ended = [request for end, request in self.running if end <= self.now]
        self.running = [(end, request) for end, request in self.running if end > self.now]
        for request in ended:
            self.control.end(request, self.now)
        budget = TOKENS_PER_S * seconds
        while self.waiting and len(self.running) < ROWS and budget > 0:
            arrival, request = min(self.waiting, key=lambda item: (self.served[item[1].key], item[0]))
            computed = min(budget, request.call_tokens - self.progress)
            budget, self.progress = budget - computed, self.progress + computed
            if self.progress >= request.call_tokens:
                self.progress = 0.0
                self.waiting.remove((arrival, request))
                self.served[request.key] += request.call_tokens / self.weights.get(request.key, 1)
                self.control.begin(request, 1, self.now)
                self.ttft.append((arrival, request.key, self.now - arrival))
                self.running.append((self.now + self.decode_s * random.uniform(0.5, 1.5), request))

    def run(self, seconds: float, rates: dict[str, float], tokens: int) -> None:
        """Requests arrive at random, `rates[key]` per second."""
        end = self.now + seconds
        while self.now < end:
            for key, rate in rates.items():
                for _ in range(int(rate * 0.01 + random.random())):
                    self.arrive(key, tokens)
            self.step()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    random.seed(1)


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


@pytest.mark.parametrize(("decode_s", "capacity"), [(0.5, 20), (4.0, 16)], ids=["prefill", "rows"])
def test_ten_times_the_load_keeps_the_queue_short_and_the_runtime_busy(decode_s, capacity) -> None:
    """The first case is limited by the prompts, 100 tokens each, the second by the rows."""
    runtime = SimulatedRuntime(decode_s)
    runtime.run(20, {"": 0.8 * capacity}, 100)
    start = runtime.now
    runtime.run(30, {"": 10 * capacity}, 100)
    times = [seconds for arrival, _, seconds in runtime.ttft if arrival > start + 5]
    assert percentile(times, 0.99) < 3 * LIMIT_S
    assert len(times) >= 0.93 * 25 * capacity
    assert all(retry_s >= 0 for *_, retry_s in runtime.refused)
    end, num_refused = runtime.now, len(runtime.refused)
    runtime.run(10, {"": 0.5 * capacity}, 100)
    assert not [arrival for arrival, *_ in runtime.refused[num_refused:] if arrival > end + 3]
    assert all(seconds < LIMIT_S for arrival, _, seconds in runtime.ttft if arrival > end + 5)


@pytest.mark.parametrize(("decode_s", "limit_s"), [(16.0, 0.3), (2.0, 6 / 32), (0.5, 0.1)])
def test_the_default_limit_is_the_time_of_six_calls(decode_s, limit_s) -> None:
    """Short prompts, so that the rows limit the calls: 4, 32 and 128 per second."""
    runtime = SimulatedRuntime(decode_s, limit_s=None)
    runtime.run(2 + 3 * decode_s, {"": 3 * ROWS / decode_s}, 1)
    assert runtime.control.calls_per_s(runtime.now) == pytest.approx(ROWS / decode_s, rel=0.35)
    start = runtime.now
    runtime.run(10, {"": 10 * ROWS / decode_s}, 1)
    times = [seconds for arrival, _, seconds in runtime.ttft if arrival > start]
    assert 0.4 * limit_s < percentile(times, 0.5) < max(1.6 * limit_s, 1.6 * MIN_WAITING_CALLS * decode_s / ROWS)


def test_the_start_of_an_overload_is_no_burst() -> None:
    """Before it the server was busy, with about 9 calls at a time, and sometimes few of them."""
    runtime = SimulatedRuntime(0.5)
    for _ in range(10):
        runtime.run(5, {"": 18}, 100)
        start, num_begun = runtime.now, len(runtime.ttft)
        runtime.run(2, {"": 200}, 100)
        times = [seconds for arrival, _, seconds in runtime.ttft[num_begun:] if arrival >= start]
        assert max(times) < 2 * LIMIT_S


def test_the_overload_of_one_key_refuses_no_request_of_another() -> None:
    runtime = SimulatedRuntime(0.5)
    for _ in range(800):
        runtime.arrive("flood", 100)
    runtime.run(20, {"flood": 200, "victim": 4}, 100)
    assert not [key for _, key, _ in runtime.refused if key == "victim"]
    assert len(runtime.refused) > 1000
    assert percentile([s for arrival, key, s in runtime.ttft if key == "victim" and arrival > 5], 0.99) < 2 * LIMIT_S


def test_a_stalled_runtime_is_measured_again() -> None:
    """A rate measured during a pause must not refuse for ever."""
    runtime = SimulatedRuntime(0.5)
    runtime.run(5, {"": 200}, 100)
    runtime.now += 30
    runtime.run(20, {"": 200}, 100)
    assert len([arrival for arrival, *_ in runtime.ttft if arrival > 40]) >= 0.9 * 20 * 15


@pytest.mark.parametrize("num_at_once", [4, 6, 32])
def test_calls_that_one_step_begins_count_all(num_at_once) -> None:
    """A rate that missed some of them would admit ever fewer."""
    control = QueueControl(ROWS, 512, LIMIT_S)
    for second in range(20):
        requests = [control.admit("", second) for _ in range(num_at_once)]
        for request in requests:
            control.set_size(request, 1, 1, 100, second)
        for request in requests:
            control.begin(request, 1, second + 0.1)
        for request in requests:
            control.end(request, second + 0.5)
    assert control.tokens_per_s(20.0) == pytest.approx(num_at_once * 100 / 0.1, rel=0.3)


def test_clients_that_return_together_find_the_runtime_fast_again() -> None:
    """All refused requests come again after a second. A stall at the start must not keep the admitted ones few."""
    runtime, waiting_clients = SimulatedRuntime(0.5), 48
    for _ in range(8):
        runtime.arrive("", 100)
    runtime.now += 10
    for _ in range(30):
        num_idle = waiting_clients - len(runtime.waiting) - len(runtime.running)
        for _ in range(num_idle):
            runtime.arrive("", 100)
        for _ in range(100):
            runtime.step()
    assert len([arrival for arrival, *_ in runtime.ttft if arrival > 30]) >= 8 * 10


def test_old_events_are_dropped() -> None:
    """A slow start counts no more once 16 calls began at the new rate."""
    rate = BusyRate(64)
    rate.set_busy(True, 0.0)
    for second in range(40):
        rate.add(1, second)
    rate.set_busy(False, 40.0)
    rate.set_busy(True, 100.0)
    for number in range(1, 17):
        rate.add(10, 100 + number / 10)
    assert rate.per_second(101.6) == pytest.approx(100)


@pytest.mark.parametrize("calls_per_step", [1, 12, 48, 200])
def test_only_complete_steps_count(calls_per_step) -> None:
    """The last 64 calls begin within a step. What is left of it came without the time before it."""
    rate = BusyRate(64)
    rate.set_busy(True, 0.0)
    for step in range(1, 101):
        for number in range(calls_per_step):  # their messages arrive within some milliseconds
            rate.add(10, step / 2 + number / 100_000)
    assert rate.per_second(50 + calls_per_step / 100_000) == pytest.approx(calls_per_step * 20, rel=0.01)


def test_idle_time_does_not_lower_the_rate() -> None:
    rate, now = BusyRate(64), 0.0
    for _ in range(10):
        rate.set_busy(True, now)
        rate.add(50, now + 0.5)
        rate.set_busy(False, now + 0.5)
        rate.add(1000, now + 0.6)
        now += 60
    assert rate.per_second(now) == pytest.approx(100)


def test_before_a_rate_is_measured_the_rows_are_filled() -> None:
    control = QueueControl(ROWS, 512, LIMIT_S)
    admitted = 0
    while control.refusal("", 0.0) is None:
        control.set_size(control.admit("", 0.0), 1, 1, 1000, 0.0)
        admitted += 1
    assert ROWS <= admitted <= ROWS + 8


def measured_control(num_running: int) -> QueueControl:
    """A control that has measured 1,000 tokens/s, and has been idle until 5 s before 100; `num_running` calls run."""
    control = QueueControl(ROWS, 512, LIMIT_S)
    control.tokens_per_s = lambda now: 1000.0
    for _ in range(num_running):
        admit_running(control)
    return control


def admit_running(control: QueueControl) -> QueuedRequest:
    """Adds a call that runs since 95."""
    request = control.admit("", 95.0)
    control.set_size(request, 1, 1, 100, 95.0)
    control.begin(request, 1, 95.0)
    return request


def num_admitted_at_once(control: QueueControl, tokens: int, now: float) -> int:
    for number in range(ROWS):
        if control.refusal("", now) is not None:
            return number
        control.set_size(control.admit("", now), 1, 1, tokens, now)
    return ROWS


@pytest.mark.parametrize(
    ("num_running", "tokens", "num_admitted"),
    [
        (0, 50, ROWS),  # 3.2 s of prompts
        (0, 200, 26),  # 5 s of prompts: not more in a burst either
        (ROWS // IDLE_ROWS, 50, ROWS - ROWS // IDLE_ROWS),  # those that find a free row
        (ROWS // IDLE_ROWS + 1, 50, 11),  # 0.5 s of prompts
    ],
)
def test_a_burst_on_an_idle_server_may_take_its_rows(num_running, tokens, num_admitted) -> None:
    control = measured_control(num_running)
    assert num_admitted_at_once(control, tokens, 100.0) == num_admitted


def test_a_burst_ends() -> None:
    control = measured_control(0)
    for _ in range(20):
        control.set_size(control.admit("", 100.0), 1, 1, 50, 100.0)
    assert control.refusal("", 100.0 + BURST_S) is None
    assert control.refusal("", 100.01 + BURST_S) is not None


@pytest.mark.parametrize(("idle_s", "num_admitted"), [(IDLE_S / 2, 11), (2 * IDLE_S, ROWS)])
def test_a_moment_without_calls_is_no_idle_server(idle_s, num_admitted) -> None:
    """Under load a server has no calls now and then, also when an overload begins."""
    control = measured_control(0)
    for request in [admit_running(control) for _ in range(4)]:
        control.end(request, 100.0)
    assert num_admitted_at_once(control, 50, 100.0 + idle_s) == num_admitted


def test_bodies_that_do_not_arrive_delay_nobody() -> None:
    control = QueueControl(ROWS, 512, LIMIT_S)
    for _ in range(ROWS):
        control.admit("", 0.0)
    assert control.predict("", 100.0) == pytest.approx(1 / 8)  # no row is left, and nothing waits
    assert control.queue_time_s(100.0) == 0


def reference_wait(waiting: dict[str, float], weights: dict[str, float], key: str, own: float) -> float:
    """The work done until `own` work of the key is done: a fluid model in small steps."""
    left = {**waiting, key: own}
    done = 0.0
    while left[key] > 1e-9:
        active = {name: weights.get(name, 1.0) for name, work in left.items() if work > 1e-9}
        total = sum(active.values())
        step = min(left[name] * total / weight for name, weight in active.items())
        for name, weight in active.items():
            left[name] -= step * weight / total
        done += step
    return done


KEYS = st.sampled_from("abcde")
EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "arrive", "begin", "end"]), KEYS, st.integers(1, 400)),
    min_size=40,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.dictionaries(KEYS, st.integers(1, 8)), st.floats(0.01, 3) | st.just(0.0))
def test_random_requests_against_a_fluid_model(events, weights, limit_s) -> None:
    """No key within its share is refused, the work in the queue is bounded, and the wait is the fluid model's."""
    control = QueueControl(2, 6, limit_s, weights)
    rate, now, alive, last_idle = 100.0, 0.0, [], 0.0
    control.tokens_per_s = lambda now: rate
    for kind, key, amount in events:
        now += 0.125  # longer than IDLE_S, and exact
        last_idle = last_idle if alive else now
        if kind == "arrive":
            check_decision(control, weights, key, now, rate, now - last_idle <= BURST_S)
            if control.refusal(key, now) is None:
                request = control.admit(key, now)
                control.set_size(request, 1, 1, amount, now)
                alive.append(request)
        elif alive:
            request = alive[amount % len(alive)]
            control.begin(request, 1, now)
            if kind == "end":
                alive.remove(request)
                control.end(request, now)
        check_counts(control, alive)
    for request in alive:
        control.end(request, now)
    check_counts(control, [])


def check_decision(control, weights, key, now, rate, was_idle) -> None:
    """Compares the decision about a new request with the reference."""
    tokens, calls = dict(control.waiting_tokens), dict(control.waiting_calls)
    token_s = reference_wait(tokens, weights, key, tokens.get(key, 0)) / rate
    free = max(0, 2 - (control.num_calls - control.num_waiting))
    before = reference_wait(calls, weights, key, calls.get(key, 0) + 1)
    expected_s = max(token_s, max(0.0, before - free) / control.calls_per_s(now))
    assert control.predict(key, now) == pytest.approx(expected_s)
    refusal = control.refusal(key, now)
    in_flight = dict(control.calls)
    own = in_flight.get(key, 0)
    fits = reference_wait(in_flight, weights, key, own + 1) <= control.capacity + 1e-6
    limit_s = control.max_queue_time_s * (BURST_FACTOR if was_idle and before <= free else 1)
    is_short = expected_s <= limit_s + 1e-9 or before <= MIN_WAITING_CALLS + 1e-9 or not limit_s
    if abs(expected_s - limit_s) > 1e-6:
        assert (refusal is None) == (fits and is_short)
    total = sum(weights.get(name, 1.0) for name in {*in_flight, key})
    share = weights.get(key, 1.0) / total
    within_calls = own + 1 <= share * control.capacity
    limit_s = control.max_queue_time_s or float("inf")
    within_rows = calls.get(key, 0) + 1 <= share * control.calls_per_s(now) * limit_s
    within_tokens = tokens.get(key, 0) <= share * rate * limit_s
    if within_calls and within_rows and within_tokens:
        assert refusal is None, "a key within its share was refused"
    if refusal is not None:
        assert refusal.is_own_share == any(name != key for name in calls)


def check_counts(control, alive) -> None:
    assert control.num_calls == sum(control.calls.values()) == len(alive)
    assert control.num_waiting == sum(control.waiting_calls.values()) == sum(r.waiting_calls for r in alive)
    assert sum(control.waiting_tokens.values()) == sum(r.waiting_calls * r.call_tokens for r in alive)
    assert control.num_calls <= control.capacity * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) * 8  # 8: the largest weight
