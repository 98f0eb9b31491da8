"""Forks, aborts, deadlines, disconnects and the end of sessions."""

from __future__ import annotations

import time

import pytest
from fake_engine import (
    assert_no_used_pages,
    generate,
    greedy,
    make_engine_loop,
    outcomes,
    post,
    run_until_idle,
)
from scripted_matchers import TextMatcher

from plait.constrained import Regex
from plait.runtime.messages import Abort, Append, Close, Finished, Fork, Generate, Open
from plait.runtime.sampling_params import sampling_params


def test_forks_accept_instructions_before_the_parent_reaches_the_fork():
    engine_loop, transport, _ = make_engine_loop()
    first = greedy([1, 2, 3], 6)
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, [1, 2, 3]),
        generate(1, 1, 6),
        Fork(1, [2, 3]),
        Append(2, [5]),
        generate(2, 2, 4),
        Fork(3, [4]),
        generate(4, 4, 4),
        Close(1),
    )
    assert calls[2].tokens == greedy([1, 2, 3, *first, 5], 4)
    assert calls[4].tokens == greedy([1, 2, 3, *first], 4)
    assert len(engine_loop.sessions) == 3


def test_forks_of_a_failed_session_fail():
    engine_loop, transport, _ = make_engine_loop(context=30)
    calls = run_until_idle(
        engine_loop, transport, Open(1), Append(1, [1] * 99), Fork(1, [2]), Append(2, [1]), generate(2, 2)
    )
    assert calls[2].end.kind == "context_overflow"


def start_long_call(engine_loop, transport, client=b"c", **params):
    """Opens session 1 of a client with a call of many tokens, and runs some steps."""
    post(transport, Open(1), Append(1, [1]), generate(1, 1, 500, ignore_eos=True, **params), client=client)
    for _ in range(5):
        engine_loop.step(0.0)


def test_an_aborted_call_leaves_its_session_alive():
    engine_loop, transport, _ = make_engine_loop()
    start_long_call(engine_loop, transport)
    calls = run_until_idle(engine_loop, transport, generate(1, 2), Abort(1, 1))
    assert calls[1].end.kind == "aborted"
    assert isinstance(calls[2].end, Finished)
    assert len(engine_loop.sessions) == 1
    assert_no_used_pages(engine_loop)


def test_a_call_fails_when_its_deadline_passes():
    engine_loop, transport, _ = make_engine_loop()
    start_long_call(engine_loop, transport, timeout_s=0.05)
    time.sleep(0.05)  # a fast machine has all 500 tokens before
    calls = run_until_idle(engine_loop, transport)
    assert calls[1].end.kind == "deadline"
    assert_no_used_pages(engine_loop)


def test_a_disconnected_client_loses_its_sessions_and_forks():
    engine_loop, transport, _ = make_engine_loop()
    start_long_call(engine_loop, transport, client=b"d")
    post(transport, Fork(1, [5]), client=b"d")
    engine_loop.step(0.0)
    assert len(engine_loop.sessions) == 2
    transport.vanished.append(b"d")
    run_until_idle(engine_loop, transport)
    assert len(engine_loop.sessions) == 0
    assert_no_used_pages(engine_loop)


def test_a_client_cannot_abort_the_session_of_another():
    engine_loop, transport, _ = make_engine_loop()
    start_long_call(engine_loop, transport)
    post(transport, Abort(1), client=b"d")
    engine_loop.step(0.0)
    assert len(engine_loop.batch_scheduler.running) == 1
    run_until_idle(engine_loop, transport, Abort(1))
    assert_no_used_pages(engine_loop)


def test_an_aborted_output_keeps_the_tokens_that_were_sent():
    """A chat continues from the part of an aborted answer that was shown."""
    prompt = [1, 2, 3]
    free = greedy(prompt, 40, ignore_eos=True)
    engine_loop, transport, _ = make_engine_loop()
    post(transport, Open(1), Append(1, prompt), generate(1, 1, 500, ignore_eos=True, stop=["zz"]))
    for _ in range(12):
        engine_loop.step(0.0)
    calls = run_until_idle(engine_loop, transport, Abort(1, 1), Append(1, [5]), generate(1, 2, 6))
    sent = calls[1].tokens
    assert calls[1].end.kind == "aborted"
    assert 5 < len(sent) < 40
    assert sent == free[: len(sent)]
    assert calls[2].tokens == greedy([*prompt, *sent, 5], 6)


def test_aborting_a_session_answers_all_its_calls():
    engine_loop, transport, _ = make_engine_loop()
    post(
        transport,
        Open(1),
        Append(1, [1]),
        generate(1, 1, 500, ignore_eos=True),
        generate(1, 2),
        Fork(1, [2]),
        generate(2, 3),
    )
    engine_loop.step(0.0)
    calls = run_until_idle(engine_loop, transport, Abort(1))
    assert {i: c.end.kind for i, c in calls.items()} == {1: "aborted", 2: "aborted", 3: "aborted"}


def test_calls_beyond_max_waiting_calls_are_rejected_at_once():
    engine_loop, transport, _ = make_engine_loop(max_waiting_calls=3, rows=1)
    requests = []
    for i in range(6):
        requests += [Open(i), Append(i, [1]), generate(i, i, 5)]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert [getattr(calls[i].end, "kind", "finished") for i in range(6)] == ["finished"] * 3 + ["overloaded"] * 3


@pytest.mark.parametrize("end", ["abort", "vanish", "deadline"])
def test_a_long_chain_of_forks_ends_without_recursion(end):
    engine_loop, transport, _ = make_engine_loop()
    timeout = {"timeout_s": 0.05} if end == "deadline" else {}
    requests = [Open(1), Append(1, [1]), generate(1, 1, 900, ignore_eos=True, **timeout), Fork(1, [2])]
    for i in range(2, 1500):
        requests += [Close(i), Fork(i, [i + 1])]
    requests += [generate(1500, 777, 1)]
    post(transport, *requests)
    engine_loop.step(0.0)
    if end == "abort":
        transport.inbox.append((b"c", Abort(1)))
    elif end == "vanish":
        transport.vanished.append(b"c")
    calls = run_until_idle(engine_loop, transport)
    if end != "vanish":
        assert calls[777].end.kind
    assert len(engine_loop.sessions) <= 2
    assert_no_used_pages(engine_loop)


def test_aborting_a_call_cancels_its_compilation():
    engine_loop, transport, _ = make_engine_loop(grammars={Regex("x"): TextMatcher([1])})
    post(transport, Open(1), Append(1, [1]), Generate(1, 1, sampling_params(), Regex("x")), Abort(1, 1))
    engine_loop.transport.receive(0, [])
    for request in (Open(1), Append(1, [1]), Generate(1, 1, sampling_params(), Regex("x")), Abort(1, 1)):
        engine_loop._handle(b"c", request)
    assert engine_loop.compiler.done == []
    assert engine_loop.calls.num_compiling == 0


def test_deadlines_of_ended_calls_are_dropped():
    engine_loop, transport, _ = make_engine_loop()
    requests = []
    for i in range(300):
        requests += [Open(i), Append(i, [1]), generate(i, i, 1, timeout_s=1000.0), Close(i)]
    run_until_idle(
        engine_loop,
        transport,
        *requests,
        Open(999),
        Append(999, [1]),
        generate(999, 999, 900, timeout_s=0.05, ignore_eos=True),
    )
    assert len(engine_loop.calls.deadlines) <= 64
    assert outcomes(transport)[999].end.kind in ("deadline", "queue_timeout")


def test_closed_sessions_leave_no_accounts_behind():
    engine_loop, transport, _ = make_engine_loop()
    requests = []
    for i in range(20):
        requests += [
            Open(i, tenant=f"t{i}"),
            Append(i, [1, 2]),
            generate(i, i, 3),
            Fork(i, [100 + i]),
            generate(100 + i, 100 + i, 3),
            Close(i),
            Close(100 + i),
        ]
    run_until_idle(engine_loop, transport, *requests)
    accounts = engine_loop.batch_scheduler.fairness
    assert (len(engine_loop.sessions), accounts._programs, accounts._accounts) == (0, {}, {})
    assert not any(shares.holders() for shares in accounts._shares)
    assert engine_loop.calls.num_open == 0
