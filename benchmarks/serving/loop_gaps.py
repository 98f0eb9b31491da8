"""Measures for how long single requests hold the server's event loop: the gaps between the wake-ups of a task.

The application runs in this process and the runtime in its own, as in `plait serve`. The target: no gap above 50 ms.

    python benchmarks/serving/loop_gaps.py [--only TEXT] [MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from large_requests import CHAT, CHAT_PATH, MAX_BODY, Case, case, request_cases
from large_work import work_cases

from plait import Runtime
from plait.runtime.server.app import Application, create_app
from plait.runtime.server.settings import server_settings

TICK_S = 0.001


def cases() -> Iterator[Case]:
    yield from request_cases()
    yield from work_cases()


async def probe(gaps: list[tuple[float, float]]) -> None:
    """Appends the gaps between wake-ups: by the clock, and in CPU time of this process, which other programs leave
    alone."""
    last, last_cpu = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(TICK_S)
        now, now_cpu = time.perf_counter(), time.process_time()
        gaps.append((now - last - TICK_S, now_cpu - last_cpu))
        last, last_cpu = now, now_cpu


async def post(app: Application, request: Case) -> tuple[int, bytes]:
    """Returns the status and the beginning of the answer, of which no more is kept."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "state": {}}
    scope |= {"path": request.path, "raw_path": request.path.encode(), "query_string": b"", "root_path": ""}
    scope |= {"headers": headers, "server": ("localhost", 80), "client": ("localhost", 1), "asgi": {"version": "3.0"}}
    received, status, begin = iter([{"type": "http.request", "body": request.body}]), 0, b""

    async def receive() -> Any:
        return next(received, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status, begin
        status = message.get("status", status)
        begin = (begin + message.get("body", b"")[:150])[:150]

    await app(scope, receive, send)
    return status, begin


async def measure(app: Application, request: Case) -> tuple[float, float, float, str]:
    """Returns the longest gap by the clock and in CPU time, the time of the response (in ms), and its status."""
    gaps: list[tuple[float, float]] = []
    task = asyncio.create_task(probe(gaps))
    await asyncio.sleep(0.05)
    gaps.clear()
    start, answer = time.perf_counter(), f"ended after {request.limit_s:g} s"
    try:
        async with asyncio.timeout(request.limit_s):
            status, begin = await post(app, request)
        answer = str(status) if status == 200 else f"{status} {begin.decode(errors='replace')}"
    except TimeoutError:  # the prompts need longer than this; the loop has done its part
        pass
    total = time.perf_counter() - start
    await asyncio.sleep(0.3)
    task.cancel()
    walls, cpu = zip(*gaps, strict=True)
    return 1000 * max(walls), 1000 * max(cpu), 1000 * total, answer


async def run(runtime: Runtime, only: str, rounds: int) -> None:
    app = create_app(runtime, server_settings(max_queue=2048, max_body_bytes=MAX_BODY))
    runtime.client.attach_to_loop()
    await measure(app, case("", CHAT_PATH, CHAT))  # loads what is loaded on demand
    for request in cases():
        if any(text in request.name for text in only.split("|")):
            results = [await measure(app, request) for _ in range(rounds)]
            wall, cpu, total = (min(result[i] for result in results) for i in range(3))  # type: ignore[type-var]
            print(f"| {request.name} | {wall:.0f} | {cpu:.0f} | {total:.0f} | {results[0][3]} |", flush=True)
    runtime.client.detach_from_loop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument(
        "--context-length", type=int, help="that the server believes the model has: longer prompts pass"
    )
    options = parser.parse_args()
    with Runtime(options.model) as runtime:
        gc.collect()
        gc.freeze()  # as `plait serve` does
        if options.context_length:
            runtime.client.model = msgspec.structs.replace(runtime.client.model, context_length=options.context_length)
        print("| request | longest gap, ms | in CPU time | answer, ms | status |")
        asyncio.run(run(runtime, options.only, options.rounds))


if __name__ == "__main__":
    main()
