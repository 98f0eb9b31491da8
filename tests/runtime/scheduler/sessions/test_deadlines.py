"""Deadlines: a call that never began fails with queue_timeout, at the latest after the step in which time ran out."""

from __future__ import annotations

import pytest
from fake_engine import generate, make_engine_loop, outcomes, post, run_until_idle

from plait.runtime.errors import DeadlineExceeded, QueueTimeout, call_failed
from plait.runtime.messages import Append, Failed, Open, Select
from plait.runtime.scheduler.sessions import deadlines
from plait.runtime.server.errors import as_api_error


class Clock:
    """Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", clock)
    return clock


def queued(call_id):
    return generate(2, call_id, 5, timeout_s=1.0)


@pytest.mark.parametrize("message", [queued(2), Select(2, 2, [[1], [2]], timeout_s=1.0)])
def test_a_call_that_never_began_fails_with_queue_timeout(clock, message):
    engine_loop, transport, _ = make_engine_loop(rows=1)
    post(transport, Open(1), Append(1, [1]), generate(1, 1, 500, timeout_s=1.5, ignore_eos=True))
    post(transport, Open(2), Append(2, [2]), message)
    engine_loop.step(0.0)
    clock.now += 1.2
    engine_loop.step(0.0)
    assert outcomes(transport)[2].end.kind == "queue_timeout"
    clock.now += 1
    assert run_until_idle(engine_loop, transport)[1].end.kind == "deadline"
    assert not engine_loop.sessions.calls.num_open


def test_an_expired_call_is_answered_before_the_next_step(clock):
    """The transport sends at the beginning of `receive` what was queued before."""
    engine_loop, transport, runner = make_engine_loop(rows=1)
    answered, receive, forward = [], transport.receive, runner.forward

    def receive_and_look(timeout_s, wake_fds):
        answered.append({reply.call for _, reply in transport.outbox if isinstance(reply, Failed)})
        return receive(timeout_s, wake_fds)

    def slow_forward(batch):
        clock.now += 0.6
        return forward(batch)

    transport.receive, runner.forward = receive_and_look, slow_forward
    post(transport, Open(1), Append(1, [1]), generate(1, 1, 500, ignore_eos=True))
    post(transport, Open(2), Append(2, [2]), queued(2))
    for _ in range(3):
        engine_loop.step(0.0)
    assert answered == [set(), set(), {2}]  # it expired in the second step


def test_the_deadlines_of_rejected_calls_are_dropped():
    engine_loop, transport, _ = make_engine_loop()
    for i in range(300):
        run_until_idle(engine_loop, transport, Open(i), generate(i, i, 1, timeout_s=1000.0))  # no prompt: invalid
    assert not engine_loop.calls.deadlines._active and len(engine_loop.calls.deadlines) <= 64


def test_queue_timeout_is_a_deadline_and_503_over_http():
    error = call_failed("queue_timeout", "late")
    assert isinstance(error, QueueTimeout) and isinstance(error, DeadlineExceeded)
    api_error = as_api_error(error, retry_after_s=2)
    assert (api_error.status, api_error.code, api_error.headers["Retry-After"]) == (503, "queue_timeout", "2")
    assert as_api_error(call_failed("deadline", "late")).status == 504
