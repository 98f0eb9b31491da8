"""Requests that hold the server's event loop: the longest gap between the wake-ups of a task, for each kind.

The application runs in this process, since the gaps of another process cannot be seen; the runtime has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

from faults.figures import Figure, Scale, at_most
from faults.large_requests import MAX_BODY, SLOW, kinds

from plait import Runtime
from plait.runtime.server.app import Application, create_app
from plait.runtime.server.settings import server_settings

LIMIT_MS = 50.0
TICK_S = 0.001
CUT_OFF_S = 4.0  # a request is cut off then: the work on some prompts takes minutes, and the loop has done its part
SHORT = ("a short chat", "8 MiB of []", "a message of 1 MB", "128 tools of 0 properties")


def inflict(scale: Scale) -> Iterator[Figure]:
    with Runtime() as runtime:
        gc.collect()
        gc.freeze()  # as `plait serve` does
        try:
            gaps = asyncio.run(measure_all(runtime, scale))
        finally:
            gc.unfreeze()
    slowest = max(gaps, key=lambda name: gaps[name][1])
    wall, cpu = gaps[slowest]
    above = [f"{name} {own:.0f} ms" for name, (_, own) in gaps.items() if own > LIMIT_MS and name != slowest]
    note = f"{slowest}, by the clock {wall:.0f} ms" + (f"; also {', '.join(above)}" if above else "")
    fault = f"{len(gaps)} kinds of large requests: the longest gap of the loop, in processor time"
    yield at_most(fault, cpu, LIMIT_MS, "ms", note, is_timed=True)


async def measure_all(runtime: Runtime, scale: Scale) -> dict[str, tuple[float, float]]:
    """{kind: (longest gap by the clock, in processor time of this process)}, in ms."""
    app = create_app(runtime, server_settings(max_queue=2048, max_body_bytes=MAX_BODY))
    runtime.client.attach_to_loop()
    await post(app, *next(kinds()))  # loads what is loaded on demand
    found = {}
    for name, path, body in kinds():
        if scale.is_short and name not in SHORT:
            continue
        gaps: list[tuple[float, float]] = []
        task = asyncio.create_task(watch(gaps))
        await asyncio.sleep(0.05)
        gaps.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOW.get(name, CUT_OFF_S)):
                await post(app, name, path, body)
        await asyncio.sleep(0.3)
        task.cancel()
        walls, cpu = zip(*gaps, strict=True)
        found[name] = 1000 * max(walls), 1000 * max(cpu)
    runtime.client.detach_from_loop()
    return found


async def watch(gaps: list[tuple[float, float]]) -> None:
    """Appends the gaps between wake-ups: by the clock, and in processor time."""
    last, last_cpu = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(TICK_S)
        now, now_cpu = time.perf_counter(), time.process_time()
        gaps.append((now - last - TICK_S, now_cpu - last_cpu))
        last, last_cpu = now, now_cpu


async def post(app: Application, name: str, path: str, body: bytes) -> None:
    """Sends a request to the application, and drops its answer."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "state": {}}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    scope |= {"server": ("localhost", 80), "client": ("localhost", 1), "asgi": {"version": "3.0"}}
    received = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        return next(received, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    await app(scope, receive, send)
