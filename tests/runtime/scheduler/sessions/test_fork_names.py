"""Two forks that name the same child: the child belongs to the session whose fork came first."""

from __future__ import annotations

from fake_engine import assert_no_used_pages, generate, greedy, make_engine_loop, run_until_idle

from plait.runtime.messages import Append, Close, Fork, Open


def test_a_child_gets_the_text_of_the_session_that_named_it_first():
    """Also when the other parent gets its own text first: the children of a fork run the last one first."""
    engine_loop, transport, _ = make_engine_loop()
    trunk = [1, 2, 3]
    calls = run_until_idle(
        engine_loop,
        transport,
        Open(1),
        Append(1, trunk),
        generate(1, 10, 4, ignore_eos=True),
        Fork(1, [2, 3]),
        Append(2, [5]),
        Append(3, [6, 6]),
        Fork(2, [4]),
        Fork(3, [4]),
        generate(4, 11, 4, ignore_eos=True),
    )
    text = [*trunk, *greedy(trunk, 4, ignore_eos=True), 5]
    assert calls[11].tokens == greedy(text, 4, ignore_eos=True)
    run_until_idle(engine_loop, transport, *(Close(session) for session in (1, 2, 3, 4)))
    assert len(engine_loop.sessions) == 0
    assert_no_used_pages(engine_loop)
