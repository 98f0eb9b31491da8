"""Requests that hold the server's event loop: the longest gap between the wake-ups of a task, for each kind.

The application runs in this process, since the gaps of another process cannot be seen.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import loop_gaps
from faults.figures import Figure, Scale, at_most
from large_requests import CHAT, CHAT_PATH, MAX_BODY, case

from plait import Runtime
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings

LIMIT_MS = 50.0
ANSWERS = (  # of those that take many seconds
    "16 echoes of 3,000 tokens with logprobs as a stream",
    "128 answers of 100 tokens with 20 logprobs",
)
SHORT = ("8 MiB of []", "a message of 1 MB", "128 tools of 0 properties")


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
    """{kind: (longest gap by the clock, in processor time)}, in ms."""
    app = create_app(runtime, server_settings(max_queue=2048, max_body_bytes=MAX_BODY))
    runtime.client.attach_to_loop()
    gaps: dict[str, tuple[float, float]] = {}
    await loop_gaps.measure(app, case("", CHAT_PATH, CHAT))
    for request in loop_gaps.cases():
        if request.name in SHORT if scale.is_short else request.limit_s <= 10 or request.name in ANSWERS:
            wall, cpu, _, _ = await loop_gaps.measure(app, request)
            gaps[request.name] = wall, cpu
    runtime.client.detach_from_loop()
    return gaps
