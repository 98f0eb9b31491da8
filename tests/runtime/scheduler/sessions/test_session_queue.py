"""The queue of a session with a running call: its bounds, and instructions within the bounds."""

from __future__ import annotations

from fake_engine import LETTERS, greedy, make_engine_loop, post, run_until_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.request import GenerationRequest
from plait.runtime.messages import Append, Close, Failed, Finished, Fork, Generate, Open, Select
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.sessions import session_queue
from plait.runtime.scheduler.sessions.session import Session

CONTEXT = 40


def gen(session, call, n=4, **more):
    return Generate(session, call, sampling_params(max_tokens=n, temperature=0.0, ignore_eos=True, **more))


instructions = st.one_of(
    st.lists(st.integers(1, 3), max_size=24).map(lambda ids: ("append", ids)),
    st.integers(1, 6).map(lambda n: ("gen", n)),
    st.just(("stop", 0)),
    st.just(("select", 0)),
    st.just(("fork", 0)),
)


def call_of(kind, session, call, value):
    if kind == "select":
        return Select(session, call, [[1, 2], [3]])
    return gen(session, call, value) if kind == "gen" else gen(session, call, 6, stop=("ab", "c"))


def messages_of(steps):
    """Messages of a session that forks; every step is sent to the newest fork."""
    requests, session, call = [Open(0), Append(0, [1, 2])], 0, 0
    for kind, value in steps:
        if kind == "append":
            requests.append(Append(session, value))
        elif kind == "fork":
            requests.append(Fork(session, [session + 1]))
            session += 1
        else:
            requests.append(call_of(kind, session, call, value))
            call += 1
    return requests


@settings(max_examples=150, deadline=None)
@given(st.lists(instructions, max_size=10))
def test_messages_sent_at_once_equal_messages_sent_one_by_one(steps):
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)
    at_once = run_until_idle(engine_loop, transport, *messages_of(steps))
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)
    one_by_one = {}
    for request in messages_of(steps):
        one_by_one = run_until_idle(engine_loop, transport, request)
    assert at_once.keys() == one_by_one.keys()
    for call, outcome in at_once.items():
        assert outcome.tokens == one_by_one[call].tokens
        assert getattr(outcome.end, "kind", None) == getattr(one_by_one[call].end, "kind", None)


def queued_tokens(session):
    return sum(len(item.token_ids) for item in session.queue._queue.values() if isinstance(item, Append))


def test_text_after_a_running_call_is_bounded_by_the_context():
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)
    texts = [Append(0, [1 + i % 3] * 7) for i in range(1000)]
    post(transport, Open(0), Append(0, [1]), gen(0, 1), *texts, gen(0, 2))
    engine_loop.receive(0.0)
    (session,) = engine_loop.sessions._sessions.values()
    assert queued_tokens(session) <= CONTEXT
    assert len(session.queue) < 12
    calls = run_until_idle(engine_loop, transport)
    assert calls[1].tokens == greedy([1], 4)
    assert calls[2].end.kind == "context_overflow"
    assert f"the context holds {CONTEXT}" in calls[2].end.text


def test_text_up_to_the_context_is_accepted():
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)
    pieces = [Append(0, [1 + i % 3]) for i in range(CONTEXT - 6)]
    calls = run_until_idle(engine_loop, transport, Open(0), Append(0, [1]), gen(0, 1), *pieces, gen(0, 2, 1))
    assert isinstance(calls[1].end, Finished)
    assert isinstance(calls[2].end, Finished)
    assert calls[2].end.usage.prompt_tokens == CONTEXT - 1


def test_text_that_fits_after_a_stop_string_is_cut_is_accepted():
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)
    out = greedy([1], 12)
    cut = "".join(LETTERS[token - 1] for token in out)[-3:]
    post(transport, Open(0), Append(0, [1]), gen(0, 1, 20, stop=(cut,)))
    session = None
    while session is None or len(session.seq) < 1 + len(out) - 1:
        engine_loop.step(timeout_s=0.0)
        (session,) = engine_loop.sessions._sessions.values()
    assert isinstance(session.active_call, GenerationRequest)
    left = CONTEXT - 1 - (len(out) - 3)
    calls = run_until_idle(engine_loop, transport, Append(0, [2] * left), gen(0, 2, 0))
    assert calls[1].tokens == out[:-3]
    assert isinstance(calls[2].end, Finished)
    assert calls[2].end.usage.prompt_tokens == CONTEXT


def test_other_instructions_are_bounded_and_all_calls_are_answered(monkeypatch):
    monkeypatch.setattr(session_queue, "MAX_WEIGHT", 20)
    engine_loop, transport, _ = make_engine_loop(context=200)
    selects = [Select(0, call, [[1, 2], [3]]) for call in range(2, 12)]  # the weight of each is 4
    children = [Fork(0, [1, 2]), Append(1, [1]), gen(1, 50), gen(2, 51)]
    calls = run_until_idle(
        engine_loop, transport, Open(0), Append(0, [1]), gen(0, 1), *selects, *children, Close(0), Close(1)
    )
    assert isinstance(calls[1].end, Finished)
    for call in (*range(2, 12), 50, 51):
        assert isinstance(calls[call].end, Failed), call
    assert calls[7].end.kind == calls[51].end.kind == "overloaded"
    assert engine_loop.calls.num_open == 0
    run_until_idle(engine_loop, transport, Close(2))
    assert len(engine_loop.sessions) == 0


def test_text_may_fill_the_tokens_that_a_select_replaces():
    """Whether the text is queued while the select waits or while it runs."""
    for context in (10, 9):
        engine_loop, transport, _ = make_engine_loop(context=context)
        select = Select(0, 2, [[3], [4]], replaced=3)
        before = [Open(0), Append(0, [1, 2, 3, 4]), gen(0, 1, 0), Append(0, [5, 6, 7])]
        calls = run_until_idle(engine_loop, transport, *before, select, Append(0, [1] * 5), gen(0, 3, 0))
        assert isinstance(calls[2].end, Finished)
        if context == 10:
            assert calls[3].end.usage.prompt_tokens == 4 + 1 + 5
        else:
            assert calls[3].end.kind == "context_overflow"


def test_an_invalid_replaced_count_does_not_widen_the_queue():
    queue = session_queue.SessionQueue(100)
    for call in range(10):
        assert queue.put(Select(0, call, [[1]], replaced=1 << 60 if call % 2 else -(1 << 60)), 0)
    assert queue.put(Append(0, [1] * 140), 0) and queue.put(Append(0, [1]), 0)
    assert isinstance(queue.clear()[-1], session_queue.TextOverflow)


def test_removing_a_call_frees_its_weight(monkeypatch):
    monkeypatch.setattr(session_queue, "MAX_WEIGHT", 12)
    queue = session_queue.SessionQueue(100)
    for call in range(50):
        assert queue.put(Select(0, call, [[1] * 9]), 0)
        assert queue.put(Append(0, [1]), 0)
        assert queue.put(Close(0), 0) and queue.put(Close(0), 0)
        assert queue.pop_call(call) and not queue.pop_call(call)
        assert [type(queue.pop()) for _ in range(len(queue))] == [Append, Close]


def test_a_repeated_internal_error_is_logged_once_and_counted(capsys):
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)

    def broken(request):
        raise ZeroDivisionError("an internal error")

    engine_loop.batch_scheduler.add = broken
    requests = [r for i in range(250) for r in (Open(i), Append(i, [1]), gen(i, i))]
    calls = run_until_idle(engine_loop, transport, *requests)
    assert {call.end.kind for call in calls.values()} == {"internal"}
    assert len(calls) == 250
    log = capsys.readouterr().err
    assert log.count("Traceback") == log.count("an internal error") - 1 == 1
    assert [line.split(": ")[1] for line in log.splitlines() if "so far" in line] == [
        "10 times so far",
        "100 times so far",
    ]


def test_removing_a_call_does_not_scan_the_queue(monkeypatch):
    num_checks = [0]

    class CountingMeta(type):
        def __instancecheck__(cls, value):
            num_checks[0] += 1
            return isinstance(value, Generate | Select)

    monkeypatch.setattr(session_queue, "SessionCall", CountingMeta("SessionCall", (), {}))
    queue, count = session_queue.SessionQueue(CONTEXT), 500
    for call in range(count):
        assert queue.put(gen(0, call), 0)
    assert all(queue.pop_call(call) for call in range(count - 1, 0, -1))
    assert not queue.pop_call(count - 1)
    assert queue.put(Close(0), 0) and queue.put(Close(0), 0)
    assert isinstance(queue.pop(), Generate) and isinstance(queue.pop(), Close) and not len(queue)
    assert num_checks[0] < 10 * count


def test_materializing_the_children_of_a_fork_takes_linear_time(monkeypatch):
    engine_loop, transport, _ = make_engine_loop(context=CONTEXT)
    num_checks = [0]

    def is_equal(first, second):
        num_checks[0] += 1
        return first is second

    run_until_idle(engine_loop, transport, Open(0), Append(0, [1, 2]))
    monkeypatch.setattr(Session, "__eq__", is_equal)
    run_until_idle(engine_loop, transport, Fork(0, list(range(1, 300))))
    assert num_checks[0] < 300
