"""`Close` lets the calls of a session run to their end; an `Abort` after it ends them at once."""

from __future__ import annotations

from fake_engine import assert_no_used_pages, generate, make_engine_loop, post, run_until_idle

from plait.runtime.messages import Abort, Append, Close, Finished, Fork, Open


def start_closed_fork(engine_loop, transport):
    """Session 1 and its fork 2, both closed, each with a running call and a queued one."""
    post(transport, Open(1), Append(1, [1, 2, 3]), Fork(1, [2]))
    for session in (1, 2):
        post(
            transport,
            generate(session, 10 * session, 20, ignore_eos=True),
            generate(session, 10 * session + 1, 4, ignore_eos=True),
            Close(session),
        )
    for _ in range(5):
        engine_loop.step(0.0)
    assert len(engine_loop.batch_scheduler.running) == 2


def test_calls_of_a_closed_session_run_to_their_end():
    engine_loop, transport, _ = make_engine_loop()
    start_closed_fork(engine_loop, transport)
    calls = run_until_idle(engine_loop, transport)
    assert all(isinstance(calls[call].end, Finished) for call in (10, 11, 20, 21))
    assert len(engine_loop.sessions) == engine_loop.calls.num_open == 0
    assert_no_used_pages(engine_loop)


def test_an_abort_ends_the_calls_of_a_closed_session_and_of_no_other():
    engine_loop, transport, _ = make_engine_loop()
    start_closed_fork(engine_loop, transport)
    calls = run_until_idle(engine_loop, transport, Abort(2))
    assert [calls[call].end.kind for call in (20, 21)] == ["aborted", "aborted"]
    assert all(isinstance(calls[call].end, Finished) for call in (10, 11))
    assert len(engine_loop.sessions) == engine_loop.calls.num_open == 0
    assert_no_used_pages(engine_loop)
