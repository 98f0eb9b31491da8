"""Keys beside each other: their shares of rows and tokens, and how long each waits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from common.http import LONG, ask, request, send
from faults.figures import Figure, Scale, at_most
from faults.served import KEYS, serve

BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 8, "temperature": 0}


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve(keys=KEYS) as server:
        for num_streams in (64, scale.count(256, 80)):
            yield asyncio.run(beside_streams(server.port, num_streams, scale.count(10, 3)))
        yield asyncio.run(equal_demands(server.port, scale.count(12, 4)))
    keys = [f"k{number}-secret" for number in range(scale.count(200, 20))]
    with serve(f"--max-batch-rows={scale.count(64, 8)}", keys=keys) as server:
        yield from asyncio.run(many_keys(server.port, keys, scale.count(30, 10)))


class Counted:
    """Streams that count their events, which are tokens, by key."""

    def __init__(self, port: int) -> None:
        self.port, self.tokens = port, Counter[str]()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def begun(cls, port: int, keys: Sequence[str], max_tokens: int) -> AsyncIterator[Counted]:
        """A stream of each of `keys`, followed by another one, until the block ends."""
        counted = cls(port)
        counted.begin(keys, max_tokens)
        try:
            yield counted
        finally:
            for task in counted._tasks:
                task.cancel()
            await asyncio.gather(*counted._tasks, return_exceptions=True)

    def begin(self, keys: Sequence[str], max_tokens: int) -> None:
        self._tasks += [asyncio.create_task(self._stream(key, max_tokens)) for key in keys]

    async def _stream(self, key: str, max_tokens: int) -> None:
        while True:
            body = LONG | {"max_tokens": max_tokens, "prompt": f"A story number {random.random()} about"}
            reader, writer = await send(self.port, request("/v1/completions", body, key))
            try:
                while (part := await reader.read(1 << 16)) and not part.endswith(b"0\r\n\r\n"):
                    self.tokens[key] += part.count(b"data: {")
            finally:
                writer.close()

    async def served(self, seconds: float) -> Counter[str]:
        """The tokens of each key in the next seconds."""
        before = self.tokens.copy()
        await asyncio.sleep(seconds)
        return self.tokens - before


async def beside_streams(port: int, num_streams: int, count: int) -> Figure:
    """One key's long streams hold all rows; the other asks for 16 tokens, `count` times."""
    latencies: list[float] = []
    async with Counted.begun(port, [KEYS[0]] * num_streams, 4000):
        await asyncio.sleep(3)
        for _ in range(count):
            start, body = time.perf_counter(), BODY | {"max_tokens": 16, "ignore_eos": True}
            status, _ = await ask(port, request("/v1/completions", body, KEYS[1], closes=True))
            latencies.append(time.perf_counter() - start if status == 200 else math.inf)
    fault = f"{num_streams} long streams of one key: 16 tokens of another"
    return at_most(fault, max(latencies), 1.5, "s", f"median {statistics.median(latencies):.2f} s", is_timed=True)


async def equal_demands(port: int, seconds: int) -> Figure:
    """One key has 300 streams at any time, and for some seconds the other has 64: more than its half of the rows."""
    async with Counted.begun(port, [KEYS[0]] * 300, 128) as streams:
        await asyncio.sleep(3)
        streams.begin([KEYS[1]] * 64, 128)
        await asyncio.sleep(2)
        served = await streams.served(seconds)
    share = 100 * served[KEYS[1]] / max(1, served.total())
    fault = "300 streams of one key, then 64 of another: its share of the tokens from 2 s on"
    return Figure(fault, ">= 45 %", f"{share:.0f} %", share >= 45, is_timed=True)


async def many_keys(port: int, keys: list[str], seconds: int) -> list[Figure]:
    """Each key has one stream at any time, which is several times as many as there are rows."""
    totals = []
    for of in ([keys[0]] * len(keys), keys):
        async with Counted.begun(port, of, 4000) as streams:
            await asyncio.sleep(5)
            served = await streams.served(seconds)
        totals.append(served.total())
    parts = [served[key] * len(keys) / max(1, served.total()) for key in keys]
    fault = f"{len(keys)} keys with a stream each, for {seconds} s: tokens of a key"
    measured, kept = f"{min(parts):.2f} to {max(parts):.2f} times its share", min(parts) >= 0.8 and max(parts) <= 1.2
    of_all = 100 * totals[1] / max(1, totals[0])
    return [
        Figure(fault, "0.8 to 1.2 times its share", measured, kept, is_timed=True),
        Figure("the same: tokens of all", ">= 90 % of one key's", f"{of_all:.0f} %", of_all >= 90, is_timed=True),
    ]
