"""Engines that are made up, for an `EnginePool`, and a record of which ran beside which."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from plait.runtime.errors import CorruptModel
from plait.runtime.server.engines.engine_pool import EnginePool
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.settings import server_settings

GIB = 1 << 30


class FakeEngine:
    """An engine without a runtime."""

    has_given_up = False

    def __init__(self, host: Host, name: str) -> None:
        self._host, self.name = host, name
        info = SimpleNamespace(max_batch_rows=3, server_pid=1)
        self.client = SimpleNamespace(model=info, tokenizer=SimpleNamespace(chat_template=None), is_closed=False)

    def attach_to_loop(self) -> None:
        assert self._host.running[self.name] is self

    detach_from_loop = attach_to_loop

    def shutdown(self) -> None:
        self._host.end(self)


class Host:
    """Starts engines, and keeps a record: no more than `keep` at once, none ended while requests use it."""

    def __init__(self, keep: int, failing: tuple[str, ...] = (), delay_s: float = 0.0) -> None:
        self.keep, self.failing, self.delay_s = keep, set(failing), delay_s
        self.running: dict[str, FakeEngine] = {}
        self.events: list[str] = []
        self.users: dict[str, int] = {}
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def start(self, model, stuck_after_s, settings, name):
        time.sleep(self.delay_s)
        with self._lock:
            if name in self.failing:
                self.events.append(f"failed {name}")
                raise CorruptModel(f"{name} is damaged")
            if name in self.running or len(self.running) >= self.keep:
                self.problems.append(f"{name} beside {sorted(self.running)}")
            self.events.append(f"+{name}")
            engine = self.running[name] = FakeEngine(self, name)
            return engine

    def end(self, engine: FakeEngine) -> None:
        with self._lock:
            if self.users.get(engine.name):
                self.problems.append(f"{engine.name} ended under {self.users[engine.name]} requests")
            if self.running.pop(engine.name, None) is not engine:
                self.problems.append(f"{engine.name} ended twice")
            self.events.append(f"-{engine.name}")

    def pool(self, names="abc", keep_bytes=None, sizes=None, **options) -> EnginePool:
        specs = [
            ModelSpec(
                name, name, Path(__file__), {"kv_memory_bytes": (sizes or {}).get(name, GIB), "device": "cpu"}, name
            )
            for name in names
        ]
        return EnginePool(specs, server_settings(), self.keep, keep_bytes, start=self.start, **options)


async def use(pool, host, model, hold: asyncio.Event | float = 0.0, timeout_s=None, is_background=False) -> None:
    """One request for `model`, which takes until `hold`."""
    await pool.acquire(model, timeout_s, is_background)
    host.users[model.name] = host.users.get(model.name, 0) + 1
    try:
        if model.name not in host.running or model.engine is not host.running[model.name]:
            host.problems.append(f"{model.name} is used without an engine")
        await (asyncio.sleep(hold) if isinstance(hold, float) else hold.wait())
    finally:
        host.users[model.name] -= 1
        pool.release(model, is_background)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def run_with(host, names, check, **options) -> None:
    """Runs `check(pool, model of each name...)` in a loop, with a pool that is ended after it."""

    async def run() -> None:
        pool = host.pool(names, **options)
        pool.attach_to_loop()
        try:
            async with asyncio.timeout(30):
                await check(pool, *pool.models)
        finally:
            pool.detach_from_loop()
            pool.shutdown()

    asyncio.run(run())
    assert host.problems == []
