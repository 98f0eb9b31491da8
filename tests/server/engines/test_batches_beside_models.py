"""Lines of batches and the models of requests: which model leaves for which."""

from __future__ import annotations

import asyncio

import pytest
from fake_engines import Host, run_with, until, use

from plait.runtime.errors import DeadlineExceeded
from plait.runtime.server.engines import engine_pool
from plait.runtime.server.errors import ApiError


def line(pool, host, model, hold=0.0, timeout_s=None):
    return asyncio.create_task(use(pool, host, model, hold, timeout_s, is_background=True))


def test_no_model_with_requests_leaves_for_a_line(monkeypatch) -> None:
    monkeypatch.setattr(engine_pool, "BATCH_AFTER_S", 0.05)
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        hold = asyncio.Event()
        running = asyncio.create_task(use(pool, host, a, hold))
        await until(lambda: host.users.get("a"))
        waiting = line(pool, host, b)
        await asyncio.sleep(0.1)
        await use(pool, host, a)  # is admitted at once
        assert not a.is_leaving and host.events == ["+a"] and not waiting.done()
        hold.set()
        await running
        await use(pool, host, a)
        await asyncio.sleep(0.01)
        assert a.engine_state == "loaded" and host.events == ["+a"]  # it may be asked again soon
        await waiting
        assert host.events == ["+a", "-a", "+b"]
        await use(pool, host, a)  # a request need not wait for that
        assert host.events[-2:] == ["-b", "+a"]

    run_with(host, "ab", check)


def test_lines_load_a_model_where_there_is_room() -> None:
    host = Host(keep=2)

    async def check(pool, a, b) -> None:
        await use(pool, host, a)
        await line(pool, host, b)
        assert host.events == ["+a", "+b"]

    run_with(host, "ab", check)


def test_lines_take_turns_with_lines_of_other_models() -> None:
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        hold = asyncio.Event()
        first = line(pool, host, a, hold)
        await until(lambda: host.users.get("a"))
        second = line(pool, host, b)
        await asyncio.sleep(0.01)
        assert a.is_leaving
        await use(pool, host, a)  # a request: the model stays for it, although lines of another one wait
        assert not first.done()
        hold.set()
        await first
        assert host.events == ["+a"] and not second.done()
        second.cancel()

    run_with(host, "ab", check)


def test_a_request_comes_before_lines_that_have_waited_longer(monkeypatch) -> None:
    monkeypatch.setattr(engine_pool, "BATCH_AFTER_S", 0.0)
    host = Host(keep=1, delay_s=0.02)

    async def check(pool, a, b, c) -> None:
        first = asyncio.create_task(use(pool, host, a))
        await asyncio.sleep(0)
        lines = line(pool, host, b)
        await asyncio.sleep(0)
        await asyncio.gather(first, use(pool, host, c), lines)
        assert [event for event in host.events if event[0] == "+"] == ["+a", "+c", "+b"]

    run_with(host, "abc", check)


def test_a_line_waits_as_long_as_its_batch(monkeypatch) -> None:
    monkeypatch.setattr(engine_pool, "MAX_WAIT_S", 0.01)
    host = Host(keep=1)

    async def check(pool, a, b) -> None:
        await use(pool, host, a)
        waiting = line(pool, host, b)
        with pytest.raises(DeadlineExceeded, match=r"0\.02 s"):
            await line(pool, host, b, timeout_s=0.02)
        await asyncio.sleep(0.03)
        assert not waiting.done()
        pool.refuse_batches()  # the server shuts down
        with pytest.raises(ApiError, match="shutting down") as refused:
            await waiting
        assert refused.value.status == 503
        with pytest.raises(ApiError, match="shutting down"):
            await line(pool, host, b)
        assert not b.batch_waiters

    run_with(host, "ab", check)
