"""`EnginePool` with engines that are made up: limits, order, failures and idle times."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engines import GIB, FakeEngine, Host, run_with, until, use
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.errors import CorruptModel, DeadlineExceeded, RuntimeGone
from plait.runtime.server.engines import engine_pool, pooled_model
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.errors import ApiError


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 32), keep=st.integers(1, 3), fails=st.booleans(), keep_alive=st.sampled_from([None, 0.0])
)
def test_random_requests(seed, keep, fails, keep_alive) -> None:
    """Every request of many is answered, fails for its own model's reason, or is cancelled, and nothing is left."""
    chance, host = random.Random(seed), Host(keep, ("d",) if fails else (), 0.0005)

    async def one(pool, model, outcomes) -> None:
        await asyncio.sleep(chance.random() * 0.02)
        timeout_s = chance.choice([None, None, 0.003])
        try:
            await use(pool, host, model, chance.random() * 0.004, timeout_s, chance.random() < 0.4)
            outcomes.append("ok")
        except DeadlineExceeded:
            outcomes.append("late")
            assert timeout_s is not None
        except ApiError as error:
            outcomes.append("failed")
            if (error.code, model.name) != ("model_start_failed", "d") or "d is damaged" not in error.message:
                host.problems.append(f"{model.name}: {error.message}")
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise

    async def run() -> None:
        pool, outcomes = host.pool("abcd", keep_alive_s=keep_alive), list[str]()
        pool.attach_to_loop()
        tasks = [asyncio.create_task(one(pool, chance.choice(pool.models), outcomes)) for _ in range(40)]
        for task in chance.sample(tasks, 6):
            asyncio.get_running_loop().call_later(chance.random() * 0.03, task.cancel)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []
        assert outcomes.count("ok") >= 1
        await until(lambda: all(model.engine_state in ("unloaded", "loaded") for model in pool.models))
        assert all(not m.waiters and not m.batch_waiters and not m.is_leaving for m in pool.models)
        assert all(not m.num_running and not m.num_requests for m in pool.models) and not pool._wanted
        assert {m.name for m in pool.models if m.engine_state == "loaded"} == set(host.running)
        if keep_alive == 0:
            await until(lambda: not host.running)
        pool.detach_from_loop()
        pool.shutdown()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_model, "INITIAL_PAUSE_S", 0.002)
        patch.setattr(engine_pool, "BATCH_AFTER_S", 0.003)
        asyncio.run(run())
    assert host.problems == [] and host.running == {}


def test_the_least_recently_used_idle_model_leaves() -> None:
    host = Host(keep=2)

    async def check(pool, a, b, c) -> None:
        await use(pool, host, a)
        await use(pool, host, b)
        await use(pool, host, a)
        await use(pool, host, c)
        assert set(host.running) == {"a", "c"}
        hold = asyncio.Event()
        running = asyncio.create_task(use(pool, host, a, hold))  # used before c, but has a request
        await until(lambda: host.users.get("a"))
        await use(pool, host, b)
        assert set(host.running) == {"a", "b"}
        hold.set()
        await running

    run_with(host, "abc", check)
    assert host.events[:6] == ["+a", "+b", "-b", "+c", "-c", "+b"]


def test_a_model_with_requests_takes_no_new_ones_for_another_and_leaves_after_them() -> None:
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        holds = [asyncio.Event() for _ in range(3)]
        first = asyncio.create_task(use(pool, host, a, holds[0]))
        await until(lambda: host.users.get("a"))
        other = asyncio.create_task(use(pool, host, b, holds[1]))
        await asyncio.sleep(0)
        later = asyncio.create_task(use(pool, host, a, holds[2]))
        await asyncio.sleep(0.02)
        assert a.is_leaving and host.users == {"a": 1} and list(host.running) == ["a"]
        holds[0].set()
        await until(lambda: host.users.get("b"))
        assert first.done() and not later.done() and b.is_leaving
        holds[1].set()
        await until(lambda: host.users.get("a"))
        holds[2].set()
        await asyncio.gather(other, later)

    run_with(host, "ab", check)
    assert host.events[:5] == ["+a", "-a", "+b", "-b", "+a"]


def test_a_model_stays_if_nobody_waits_for_its_place_any_more() -> None:
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        hold = asyncio.Event()
        first = asyncio.create_task(use(pool, host, a, hold))
        await until(lambda: host.users.get("a"))
        with pytest.raises(DeadlineExceeded, match=r"its timeout of 0\.01 s"):
            await use(pool, host, b, timeout_s=0.01)
        assert not a.is_leaving
        await use(pool, host, a)
        other = asyncio.create_task(use(pool, host, b))
        await asyncio.sleep(0)
        second = asyncio.create_task(use(pool, host, a))
        await asyncio.sleep(0.01)
        assert a.is_leaving and not second.done()
        other.cancel()
        await second
        hold.set()
        await first

    run_with(host, "ab", check)
    assert host.events == ["+a", "-a"]


def test_concurrent_requests_wait_for_one_start() -> None:
    host = Host(keep=1, delay_s=0.02)

    async def check(pool, a) -> None:
        await asyncio.gather(*(use(pool, host, a) for _ in range(20)))
        assert a.num_starts == 1 and a.queue.max_running == 3

    run_with(host, "a", check)


def end_pause(model) -> None:
    """The pause after a failed start has passed."""
    model.failure = replace(model.failure, retry_at=time.monotonic())


def test_a_failed_start_is_the_error_of_its_requests_and_is_tried_again(monkeypatch) -> None:
    monkeypatch.setattr(pooled_model, "INITIAL_PAUSE_S", 60.0)  # which no test waits for
    host = Host(keep=2, failing=("b",))

    async def check(pool, a, b) -> None:
        outcomes = await asyncio.gather(*(use(pool, host, model) for model in (b, a, b)), return_exceptions=True)
        assert [getattr(outcome, "status", None) for outcome in outcomes] == [503, None, 503]
        assert host.events.count("failed b") == 1 and b.status == "failed" and a.status == "loaded"
        with pytest.raises(ApiError, match="b is damaged") as caught:
            await use(pool, host, b)
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60 and host.events.count("failed b") == 1
        host.failing.clear()
        end_pause(b)
        await use(pool, host, b)
        assert b.failure is None and b.status == "loaded" and b.num_failed_starts == 1

    run_with(host, "ab", check)


def test_pauses_grow_and_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(pooled_model, "time", SimpleNamespace(monotonic=lambda: 100.0))
    model = Host(1).pool("a").models[0]
    pauses = []
    for _ in range(7):
        model.fail(CorruptModel("damaged"))
        pauses.append(model.failure.retry_at - 100)
    assert pauses == [5, 10, 20, 40, 60, 60, 60]


def test_a_model_whose_file_is_gone_makes_no_other_leave(tmp_path) -> None:
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        await use(pool, host, a)
        b.spec = ModelSpec("b", "b", tmp_path / "gone.gguf", {}, "b")
        with pytest.raises(ApiError, match=r"gone\.gguf is not there any more"):
            await use(pool, host, b)

    run_with(host, "ab", check)
    assert host.events == ["+a", "-a"]


def test_memory_is_a_limit_too() -> None:
    host = Host(keep=3)
    file_bytes = Path(__file__).stat().st_size
    sizes = {"a": GIB, "b": GIB, "c": 2 * GIB, "d": 9 * GIB}

    async def check(pool, a, b, c, d) -> None:
        await use(pool, host, a)
        await use(pool, host, b)
        assert set(host.running) == {"a", "b"}
        await use(pool, host, c)
        assert set(host.running) == {"b", "c"}
        await use(pool, host, d)  # exceeds the limit alone
        assert set(host.running) == {"d"}

    run_with(host, "abcd", check, keep_bytes=3 * GIB + 2 * file_bytes, sizes=sizes)


def test_keep_alive_ends_an_idle_model_and_a_request_renews_it() -> None:
    host = Host(keep=2)

    async def check(pool, a, b) -> None:
        await use(pool, host, a)
        hold = asyncio.Event()
        running = asyncio.create_task(use(pool, host, b, hold))
        assert a.unload_at is not None
        await until(lambda: "-a" in host.events)
        assert list(host.running) == ["b"] and b.unload_at is None
        hold.set()
        await running
        pool.set_keep_alive(b, float("inf"))
        await asyncio.sleep(0.1)
        assert list(host.running) == ["b"]
        await use(pool, host, b)
        pool.set_keep_alive(b, 0.0)
        await until(lambda: not host.running)
        pool.set_keep_alive(b, 0.0)  # not for its next start
        await use(pool, host, b)
        assert b.keep_alive_s == 0.03 and b.unload_at is not None

    run_with(host, "ab", check, keep_alive_s=0.03)


def test_an_engine_that_gave_up_is_started_anew(monkeypatch) -> None:
    monkeypatch.setattr(pooled_model, "INITIAL_PAUSE_S", 60.0)
    host = Host(keep=1)

    async def check(pool, a) -> None:
        hold = asyncio.Event()
        running = asyncio.create_task(use(pool, host, a, hold))
        await until(lambda: host.users.get("a"))
        a.engine.has_given_up = True
        for _ in range(2):
            with pytest.raises(ApiError, match="did not stay up"):
                await use(pool, host, a)
        end_pause(a)
        waiting = asyncio.create_task(use(pool, host, a))
        await asyncio.sleep(0.01)
        hold.set()
        await asyncio.gather(running, waiting)

    run_with(host, "a", check)
    assert host.events == ["+a", "-a", "+a", "-a"]


def test_no_request_waits_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(engine_pool, "MAX_WAIT_S", 0.05)
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        hold = asyncio.Event()
        running = asyncio.create_task(use(pool, host, a, hold))
        await until(lambda: host.users.get("a"))
        with pytest.raises(ApiError, match="no room for the model 'b'") as caught:
            await use(pool, host, b, timeout_s=99.0)
        assert caught.value.status == 503 and caught.value.headers == {"x-should-retry": "false"}
        hold.set()
        await running

    run_with(host, "ab", check)


def test_an_engine_that_gives_up_under_a_request_pauses_its_model(monkeypatch) -> None:
    monkeypatch.setattr(pooled_model, "INITIAL_PAUSE_S", 30.0)

    async def scenario() -> None:
        host = Host(keep=1)
        pool = host.pool("a")
        (a,) = pool.models
        await pool.acquire(a)
        a.engine.has_given_up = True
        pool.release(a)
        await until(lambda: a.engine_state == "unloaded")
        with pytest.raises(ApiError, match="did not stay up"):
            await pool.acquire(a)

    asyncio.run(scenario())


def test_an_engine_that_ends_as_it_should_not_leaves_its_place_to_others(caplog) -> None:
    async def scenario() -> None:
        host = Host(keep=1)
        pool = host.pool("ab")
        a, b = pool.models
        await pool.acquire(a)
        ended = a.engine.shutdown

        def shutdown() -> None:
            ended()
            raise OSError("no file descriptors")

        a.engine.shutdown = shutdown
        pool.release(a)
        await pool.acquire(b)
        assert a.engine_state == "unloaded"

    asyncio.run(scenario())
    assert "did not end as it should" in caplog.text


def test_an_engine_that_is_gone_once_it_has_started_is_a_failed_start(monkeypatch) -> None:
    def gone(self) -> None:
        raise RuntimeGone("the runtime has ended")

    monkeypatch.setattr(FakeEngine, "attach_to_loop", gone)

    async def scenario() -> None:
        host = Host(keep=1)
        pool = host.pool("a")
        (a,) = pool.models
        with pytest.raises(ApiError, match="could not be started: the runtime has ended"):
            await pool.acquire(a)
        assert a.engine_state == "unloaded"
        await until(lambda: not host.running)

    asyncio.run(scenario())
