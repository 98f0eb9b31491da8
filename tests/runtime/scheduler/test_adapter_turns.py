"""Adapters that are not resident: who waits, whose slot is taken, and what changes of names leave alone."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest
from fake_engine import generate, greedy, make_engine_loop, outcomes, post, run_until_idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manual_adapters import identity, manual_pool

from plait.runtime.adapters import adapter_pool
from plait.runtime.messages import (
    Abort,
    Append,
    Close,
    Failed,
    Finished,
    Fork,
    LoadAdapter,
    Open,
    UnloadAdapter,
    Welcome,
)

PROMPT = [5, 6, 7, 8]


def call(number, adapter, max_tokens=8, tenant="", prompt=PROMPT, **params):
    return [
        Open(number, tenant, adapter=adapter),
        Append(number, prompt),
        generate(number, number, max_tokens, ignore_eos=True, **params),
        Close(number),
    ]


@pytest.fixture
def engine(monkeypatch):
    """make(names, slots, delay, spare, ...) -> engine loop and transport; `.pool`, `.calls`."""

    def make(names, slots, delay=2, spare=0, **settings):
        pool, calls = manual_pool(monkeypatch, names, slots, delay, spare)
        loop, transport, _ = make_engine_loop(adapter_pool=pool, prompt_lookup=False, **settings)
        loop.calls_of_pool = calls
        return loop, transport

    return make


def post_calls(transport, *calls):
    post(transport, *(message for one in calls for message in one))


def steps(loop, count):
    for _ in range(count):
        loop.step(0.0)


def users(loop):
    """The running requests by the name of their adapter."""
    names = {adapter: name for name, adapter in loop.adapters.pool.names.items()}
    return Counter(names.get(request.seq.namespace.adapter, "") for request in loop.batch_scheduler.running)


def finish(loop, transport, max_steps=5000):
    """Steps until nothing waits, also for an adapter."""
    for _ in range(max_steps):
        loop.step(0.0)
        if not (loop.has_work or transport.inbox or loop.batch_scheduler.waiting):
            return outcomes(transport)
    raise AssertionError("the engine loop did not become idle")


def test_a_request_waits_for_its_adapter_while_others_run(engine):
    loop, transport = engine(["a", "b", "c"], 2, delay=5)
    post_calls(transport, call(1, ""), call(2, "a"))
    steps(loop, 3)
    assert users(loop) == {"": 1} and loop.status(0).waiting_calls == 1
    calls = finish(loop, transport)
    assert calls[1].tokens == calls[2].tokens == greedy(PROMPT, 8, ignore_eos=True)
    ends = [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]
    assert ends == [1, 2]


def test_nothing_to_do_but_to_wait_for_an_adapter_is_no_work(engine):
    loop, transport = engine(["a", "b"], 1)
    post_calls(transport, call(1, "a"))
    steps(loop, 1)
    assert not loop.has_work and loop.batch_scheduler.waiting, "the loop blocks until the adapter is read"
    assert loop.adapters.filenos()


def test_the_adapter_used_longest_ago_gives_its_slot(engine):
    loop, transport = engine(["a", "b", "c", "d"], 2)
    for number, name in enumerate("abac", 1):
        post_calls(transport, call(number, name))
        finish(loop, transport)
    assert set(loop.adapters.pool.slots) == {identity("a"), identity("c")}
    assert loop.calls_of_pool.begun == [identity(name) for name in "abc"]


def test_an_adapter_without_a_slot_is_kept_and_comes_back_without_a_read(engine):
    loop, transport = engine(["a", "b", "c"], 1, spare=1)
    for number, name in enumerate("abab", 1):
        post_calls(transport, call(number, name))
        finish(loop, transport)
    assert loop.calls_of_pool.begun == [identity("a"), identity("b")]
    post_calls(transport, call(5, "c"), call(6, "a"))
    finish(loop, transport)
    assert loop.calls_of_pool.begun == [identity("a"), identity("b"), identity("c")], "b was not wanted"
    assert list(loop.adapters.pool.kept) == [identity("a")] and list(loop.adapters.pool.slots) == [identity("c")]
    change(loop, transport, UnloadAdapter(50, "a"))
    assert not loop.adapters.pool.kept, "nobody has it any more"


def test_what_is_kept_makes_room_only_for_what_then_is_kept(engine):
    pool = engine(list("abcd"), 1, spare=2)[0].adapters.pool
    reads = {name: adapter_pool._Read(identity(name), pool._files[identity(name)], name, 1) for name in "abcd"}
    reads["d"] = reads["d"]._replace(num_bytes=9)
    for name in "ab":
        pool._keep(reads[name])
    pool._keep(reads["a"])
    assert list(pool.kept) == [identity("b"), identity("a")], "once"
    pool.kept[identity("d")], pool.wanted = reads["d"], frozenset([identity("d")])
    pool._keep(reads["c"], is_evicted=True)
    assert set(pool.kept) == {identity(name) for name in "abd"}, "d alone is too much for c"
    pool._keep(reads["c"])
    assert set(pool.kept) == {identity("c")}


def test_adapters_are_read_ahead_as_far_as_there_is_room(engine):
    loop, transport = engine(list("abcdef"), 1, delay=0, spare=2)
    post_calls(transport, call(1, "a", 40))
    steps(loop, 4)
    post_calls(transport, *(call(number, name) for number, name in enumerate("bcdef", 2)))
    steps(loop, 20)
    assert list(loop.adapters.pool.kept) == [identity(name) for name in "bc"]
    finish(loop, transport)
    assert loop.calls_of_pool.begun == [identity(name) for name in "abcdef"], "each once"


def test_an_adapter_of_running_rows_keeps_its_slot(engine):
    loop, transport = engine(["a", "b", "c"], 1)
    post_calls(transport, call(1, "a", 40))
    steps(loop, 6)
    post_calls(transport, call(2, "b"))
    steps(loop, 20)
    assert users(loop) == {"a": 1} and list(loop.adapters.pool.slots) == [identity("a")]
    assert loop.calls_of_pool.begun == [identity("a"), identity("b")], "read ahead"
    calls = finish(loop, transport)
    assert len(calls[2].tokens) == 8


def test_others_of_a_busy_adapter_do_not_overtake_for_ever(engine):
    """A stream of calls with one adapter in the only slot: another adapter's call gets it after those that run."""
    loop, transport = engine(["a", "b"], 1, rows=2)
    post_calls(transport, call(1, "a", 30), call(2, "a", 45))
    steps(loop, 6)
    post_calls(transport, call(100, "b"))
    for number in range(3, 60):
        post_calls(transport, call(number, "a", 12))
        steps(loop, 2)
    calls = finish(loop, transport)
    ends = [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]
    assert ends.index(100) == 2 and len(calls) == 60


def test_a_deadline_passes_while_a_request_waits_for_a_slot(engine):
    loop, transport = engine(["a", "b"], 1)
    post_calls(transport, call(1, "a", 400))
    steps(loop, 6)
    post_calls(transport, call(2, "b", timeout_s=1e-6))
    steps(loop, 3)
    assert outcomes(transport)[2].end.kind == "queue_timeout"
    assert users(loop) == {"a": 1}


def test_a_tenant_with_many_adapters_does_not_shut_out_another(engine):
    """One tenant's long calls with 40 adapters hold all four slots; the other's call begins after a turn at most."""
    names = [f"a{i}" for i in range(40)]
    loop, transport = engine([*names, "b"], 4, delay=1, pages=8192)
    post_calls(transport, *(call(i, name, 300, "many") for i, name in enumerate(names, 1)))
    steps(loop, 40)
    assert len(users(loop)) == 4
    post_calls(transport, call(1000, "b", 8, "one"))
    steps(loop, 40)
    assert 1000 in [reply.call for _, reply in transport.outbox if isinstance(reply, Finished)]
    calls = finish(loop, transport, 20_000)
    assert all(calls[i].tokens == greedy(PROMPT, 300, ignore_eos=True) for i in range(1, 41)), "pauses change nothing"


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("holders", [["many", "many"], ["x", "y"]])
def test_two_adapters_that_wait_for_the_same_pause(engine, holders, is_kept):
    """Two adapters of a tenant are read, and others hold both slots: a step takes one of these."""
    loop, transport = engine(["a1", "a2", "b1", "b2"], 2, delay=0, spare=8, rows=16)
    if is_kept:
        post_calls(transport, call(50, "b1", 2, "one"), call(51, "b2", 2, "one"))
        finish(loop, transport)
    adapters = ["a1", "a1", "a1", "a2"] if holders[0] == holders[1] else ["a1", "a2"]
    post_calls(transport, *(call(i, name, 300, holders[name == "a2"]) for i, name in enumerate(adapters, 1)))
    steps(loop, 12)
    post_calls(transport, call(100, "b1", 8, "one"), call(101, "b2", 8, "one"))
    ended = finish(loop, transport)
    assert all(len(ended[number].tokens) == 8 for number in (100, 101))
    assert all(len(ended[number].tokens) == 300 for number in range(1, len(adapters) + 1))


def test_an_adapter_that_cannot_be_read_fails_its_requests_only(engine):
    loop, transport = engine(["broken", "a", "b"], 2)
    post_calls(transport, call(1, "broken"), call(2, "a"), call(3, "broken"))
    calls = finish(loop, transport)
    assert [type(calls[i].end) for i in (1, 2, 3)] == [Failed, Finished, Failed]
    assert calls[1].end.text == "the adapter 'broken' is broken"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.integers(1, 20), st.sampled_from("xy")), max_size=30
    ),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_every_call_ends_with_its_own_tokens(engine, calls, slots, delay, spare):
    """Few pages and rows, so that requests are paused and retracted as well."""
    loop, transport = engine(list("abcde"), slots, delay, spare, rows=4, pages=96, batch_tokens=16)
    for number, (adapter, count, tenant) in enumerate(calls, 1):
        post_calls(transport, call(number, adapter, count, tenant, [*PROMPT, number]))
        steps(loop, 1)
        assert len(loop.adapters.pool.kept) <= spare + 2
    ended = finish(loop, transport)
    for number, (_, count, _) in enumerate(calls, 1):
        assert ended[number].tokens == greedy([*PROMPT, number], count, ignore_eos=True)


# -- names -----------------------------------------------------------------------------------------


def change(loop, transport, message):
    """Posts a change of names and returns its replies."""
    post(transport, message)
    before = len(transport.outbox)
    for _ in range(20):
        loop.step(0.0)
    return [reply for _, reply in transport.outbox[before:] if not isinstance(reply, (Finished,))]


def test_names_are_added_and_taken_away(engine):
    loop, transport = engine(["a"], 2)
    welcome, status = change(loop, transport, LoadAdapter(50, "new", "path"))
    assert isinstance(welcome, Welcome) and list(welcome.adapters) == ["a", "new"] and status.call == 50
    assert len(loop.adapters.pool.slots) == 2
    (taken,) = change(loop, transport, LoadAdapter(51, "new", "other"))
    assert (taken.call, taken.kind) == (51, "invalid") and "already been loaded" in taken.text
    (broken,) = change(loop, transport, LoadAdapter(52, "x", "broken"))
    assert "is broken" in broken.text
    for number, name in enumerate(["", "\n", "x" * 300], 53):
        (refused,) = change(loop, transport, LoadAdapter(number, name, "path"))
        assert "a printable text" in refused.text
    (unknown,) = change(loop, transport, UnloadAdapter(60, "none"))
    assert "there is no adapter 'none'" in unknown.text
    welcome, _ = change(loop, transport, UnloadAdapter(61, "a"))
    assert list(welcome.adapters) == ["new"] and len(loop.adapters.pool.slots) == 1


def test_two_that_load_one_name_at_once(engine):
    loop, transport = engine(["a"], 4)
    post(transport, LoadAdapter(1, "new", "one"), LoadAdapter(2, "new", "two"))
    steps(loop, 20)
    assert [type(reply).__name__ for _, reply in transport.outbox] == ["Welcome", "Status", "Failed"]


def test_a_runtime_without_room_for_adapters(engine):
    loop, transport, _ = make_engine_loop()
    post(transport, LoadAdapter(1, "new", "one"), UnloadAdapter(2, "x"))
    steps(loop, 2)
    assert all("start it with max_adapters" in reply.text for _, reply in transport.outbox)


def test_running_calls_and_open_sessions_keep_what_they_began_with(engine):
    """Also while another adapter waits for its slot: it gets that of one without a name when its call has ended."""
    loop, transport = engine(["a", "b"], 1)
    post_calls(transport, call(1, "a", 30)[:3])
    steps(loop, 6)
    change(loop, transport, LoadAdapter(50, "a", "other", replace=True))
    change(loop, transport, UnloadAdapter(51, "a"))
    post_calls(transport, call(3, "a"), call(4, "b"))
    steps(loop, 60)
    calls = outcomes(transport)
    assert [type(calls[i].end) for i in (1, 3, 4)] == [Finished, Failed, Finished]
    assert "there is no adapter 'a'" in calls[3].end.text
    assert list(loop.adapters.pool.slots) == [identity("b")], "the session is idle"
    post(transport, Fork(1, [2]), generate(2, 2, ignore_eos=True))
    steps(loop, 30)
    end = outcomes(transport)[2].end
    assert isinstance(end, Finished) and end.usage.cached_tokens == len(PROMPT) + 30 - 1, "its KV is still there"
    assert list(loop.adapters.pool.slots) == [identity("a")]
    post(transport, Close(1), Close(2))
    steps(loop, 2)
    assert not loop.adapters.pool.slots and list(loop.adapters.pool._files) == [identity("b")]


def test_of_two_unused_adapters_the_one_with_a_name_goes_first(engine):
    """Though it was used later: the files of the other one are more likely to have changed."""
    loop, transport = engine(["a", "b", "c"], 2)
    post_calls(transport, call(1, "a")[:3])
    finish(loop, transport)
    post_calls(transport, call(2, "b"))
    finish(loop, transport)
    change(loop, transport, UnloadAdapter(50, "a"))
    post_calls(transport, call(3, "c"))
    finish(loop, transport)
    assert set(loop.adapters.pool.slots) == {identity("a"), identity("c")}


def test_a_session_whose_adapter_cannot_be_read_again_fails(engine):
    loop, transport = engine(["a", "b"], 1)
    change(loop, transport, LoadAdapter(50, "new", "new"))
    post_calls(transport, call(1, "new")[:3])
    finish(loop, transport)
    change(loop, transport, UnloadAdapter(51, "new"))
    post_calls(transport, call(2, "b"))
    finish(loop, transport)
    loop.adapters.pool._files[identity("new")] = loop.adapters.pool._files[identity("new")]._replace(path="broken")
    post(transport, generate(1, 3, ignore_eos=True))
    assert "'new' is broken" in finish(loop, transport)[3].end.text


# -- reads that hang -------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(adapter_pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_read_that_hangs_fails_its_own_requests_and_others_are_read(engine, clock):
    loop, transport = engine(["a", "b", "c"], 2)
    loop.calls_of_pool.hung = {identity("a")}
    post_calls(transport, call(1, "a"), call(2, "a"), call(3, "b"))
    steps(loop, 20)
    assert not outcomes(transport) and 0 < loop._until_next_event(None) <= adapter_pool.READ_DEADLINE_S
    clock[0] += adapter_pool.READ_DEADLINE_S
    ended = finish(loop, transport)
    assert [ended[i].end.kind for i in (1, 2)] == ["queue_timeout"] * 2 and len(ended[3].tokens) == 8
    assert "the files of the adapter 'a' could not be read within 30 s" in ended[1].end.text
    post_calls(transport, call(4, "a"), call(5, "c"))
    ended = finish(loop, transport)
    assert ended[4].end.kind == "queue_timeout" and len(ended[5].tokens) == 8, "at once: a thread hangs already"
    assert loop.calls_of_pool.begun.count(identity("a")) == 1
    loop.calls_of_pool.hung.clear()
    steps(loop, 4)
    post_calls(transport, call(6, "a"))
    assert len(finish(loop, transport)[6].tokens) == 8


def test_a_slow_adapter_is_there_for_the_next_request(engine, clock):
    loop, transport = engine(["a", "b", "c"], 2)
    loop.calls_of_pool.hung = {identity("a")}
    post_calls(transport, call(1, "a"))
    steps(loop, 2)
    clock[0] += adapter_pool.READ_DEADLINE_S
    assert finish(loop, transport)[1].end.kind == "queue_timeout"
    loop.calls_of_pool.hung.clear()
    steps(loop, 4)
    assert identity("a") in loop.adapters.pool.kept
    post_calls(transport, call(2, "a"))
    assert len(finish(loop, transport)[2].tokens) == 8 and loop.calls_of_pool.begun == [identity("a")]


def test_an_adapter_that_nobody_has_any_more_may_hang(engine, clock):
    loop, transport = engine(["a", "b"], 1)
    loop.calls_of_pool.hung = {identity("a")}
    post_calls(transport, call(1, "a")[:3])
    steps(loop, 3)
    change(loop, transport, UnloadAdapter(50, "a"))
    post(transport, Close(1), Abort(1), *call(2, "b"))
    steps(loop, 2)
    assert list(loop.adapters.pool._files) == [identity("b")]
    clock[0] += adapter_pool.READ_DEADLINE_S
    assert len(finish(loop, transport)[2].tokens) == 8


def test_a_registration_that_hangs_fails_and_others_go_on(engine, clock):
    loop, transport = engine(["a"], 3)
    loop.calls_of_pool.hung = {"slow"}
    post(transport, LoadAdapter(1, "slow", "slow"), LoadAdapter(2, "new", "new"))
    steps(loop, 10)
    assert not transport.outbox
    clock[0] += adapter_pool.READ_DEADLINE_S
    steps(loop, 10)
    failed, *replies = [reply for _, reply in transport.outbox]
    assert (failed.call, failed.kind) == (1, "queue_timeout") and isinstance(replies[0], Welcome)
    loop.calls_of_pool.hung.clear()
    steps(loop, 10)
    assert list(loop.adapters.pool.names) == ["a", "new"], "its caller was told that it failed"


def test_threads_that_hang_are_bounded(engine, clock, monkeypatch):
    monkeypatch.setattr(adapter_pool, "MAX_HANGING", 2)
    names = [f"a{i}" for i in range(5)]
    loop, transport = engine([*names, "b"], 3)
    loop.calls_of_pool.hung = {identity(name) for name in names}
    for number, name in enumerate(names, 1):
        post_calls(transport, call(number, name))
        steps(loop, 3)
        clock[0] += adapter_pool.READ_DEADLINE_S
        steps(loop, 3)
    post(transport, LoadAdapter(90, "new", "new"))
    ended = finish(loop, transport)
    assert [ended[i].end.kind for i in range(1, 6)] == ["queue_timeout"] * 5 and len(loop.calls_of_pool.begun) == 2
    assert [reply.kind for _, reply in transport.outbox if getattr(reply, "call", 0) == 90] == ["queue_timeout"]


# -- contents --------------------------------------------------------------------------------------


def test_another_content_under_a_name_meets_nothing_of_the_old_one(engine):
    loop, transport = engine(["a"], 2)

    def num_cached(number):
        post_calls(transport, call(number, "a", prompt=list(range(1, 30))))
        return finish(loop, transport)[number].end.usage.cached_tokens

    assert [num_cached(1), num_cached(2)] == [0, 28]
    change(loop, transport, LoadAdapter(50, "a", "other", replace=True))
    assert [num_cached(3), num_cached(4)] == [0, 28]
    change(loop, transport, UnloadAdapter(51, "a"))
    change(loop, transport, LoadAdapter(52, "a", "a"))
    assert num_cached(5) == 28, "the first content again"
    assert run_until_idle(loop, transport)
