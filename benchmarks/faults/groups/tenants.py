"""Keys beside each other: shares of rows and queue, caches, aborts, and the time that a key's check takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import httpx
from common.http import LONG, ask, open_stream, request, reset, send
from faults.figures import Figure, Scale, at_most, none_of
from faults.served import KEYS, Server, serve

BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 8, "temperature": 0}
SECRET = "The secret of this tenant is long enough to be cached: " + "one two three four " * 20


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve(has_keys=True) as server:
        yield from crowded(server, scale.count(800, 100), scale.count(20, 5))
        for num_streams in (64, scale.count(256, 80)):
            yield beside_streams(server, num_streams, scale.count(10, 3))
        yield from equal_demands(server, scale.count(12, 4))
        yield separate_caches(server)
        yield separate_aborts(server)
        yield from timing_of_keys(server, scale.count(1500, 200))
    keys = [f"k{number}-secret" for number in range(scale.count(200, 20))]
    with serve(f"--max-batch-rows={scale.count(64, 8)}", has_keys=True, keys=keys) as server:
        yield from many_keys(server, keys, scale.count(30, 10))


class Counted:
    """Streams that count their events, which are tokens, by key."""

    def __init__(self, server: Server) -> None:
        self.port, self.tokens = server.port, Counter[str]()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, key: str, max_tokens: int, *, again: bool = False) -> None:
        """Starts a stream of `key`; with `again` another one follows it, for ever."""
        self._tasks.append(asyncio.create_task(self._stream(key, max_tokens, again)))

    async def _stream(self, key: str, max_tokens: int, again: bool) -> None:
        while True:
            body = LONG | {"max_tokens": max_tokens, "prompt": f"A story number {random.random()} about"}
            reader, writer = await send(self.port, request("/v1/completions", body, key))
            try:
                while (part := await reader.read(1 << 16)) and not part.endswith(b"0\r\n\r\n"):
                    self.tokens[key] += part.count(b"data: {")
            finally:
                writer.close()
            if not again:
                return

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def beside_streams(server: Server, num_streams: int, count: int) -> Figure:
    """One key's long streams hold all rows; the other asks for 16 tokens, `count` times."""
    latencies: list[float] = []

    async def run() -> None:
        streams, short = Counted(server), BODY | {"max_tokens": 16, "ignore_eos": True}
        for _ in range(num_streams):
            streams.begin(KEYS[0], 4000)
        await asyncio.sleep(3)
        for _ in range(count):
            start = time.perf_counter()
            status, _ = await ask(server.port, request("/v1/completions", short, KEYS[1], closes=True))
            latencies.append(time.perf_counter() - start if status == 200 else math.inf)
        await streams.end()

    asyncio.run(run())
    fault = f"{num_streams} long streams of one key: 16 tokens of another"
    return at_most(fault, max(latencies), 1.5, "s", f"median {statistics.median(latencies):.2f} s", is_timed=True)


def equal_demands(server: Server, seconds: int) -> Iterator[Figure]:
    """One key has 300 streams at any time, and for some seconds the other has 64: more than its half of the rows."""

    async def run() -> Counter[str]:
        streams = Counted(server)
        for _ in range(300):
            streams.begin(KEYS[0], 128, again=True)
        await asyncio.sleep(3)
        for _ in range(64):
            streams.begin(KEYS[1], 128, again=True)
        await asyncio.sleep(2)
        before = streams.tokens.copy()
        await asyncio.sleep(seconds)
        served = streams.tokens - before
        await streams.end()
        return served

    served = asyncio.run(run())
    share = 100 * served[KEYS[1]] / max(1, served.total())
    fault = "300 streams of one key, then 64 of another: its share of the tokens from 2 s on"
    yield Figure(fault, ">= 45 %", f"{share:.0f} %", share >= 45, is_timed=True)


def many_keys(server: Server, keys: list[str], seconds: int) -> Iterator[Figure]:
    """Each key has one stream at any time, which is several times as many as there are rows."""

    async def run(of: list[str]) -> Counter[str]:
        streams = Counted(server)
        for key in of:
            streams.begin(key, 4000)
        await asyncio.sleep(5)
        before = streams.tokens.copy()
        await asyncio.sleep(seconds)
        served = streams.tokens - before
        await streams.end()
        return served

    of_one = asyncio.run(run([keys[0]] * len(keys))).total()
    served = asyncio.run(run(keys))
    share = served.total() / len(keys)
    parts = [served[key] / max(1.0, share) for key in keys]
    fault = f"{len(keys)} keys with a stream each, for {seconds} s: tokens of a key"
    measured = f"{min(parts):.2f} to {max(parts):.2f} times its share"
    kept = min(parts) >= 0.8 and max(parts) <= 1.2
    yield Figure(fault, "0.8 to 1.2 times its share", measured, kept, is_timed=True)
    of_all = 100 * served.total() / max(1, of_one)
    yield Figure("the same: tokens of all", ">= 90 % of one key's", f"{of_all:.0f} %", of_all >= 90, is_timed=True)


def crowded(server: Server, num_connections: int, seconds: int) -> Iterator[Figure]:
    """One key keeps `num_connections` requests open; the other sends one after the other."""
    latencies: list[float] = []
    refused: list[str] = []

    async def crowd(end: float) -> None:
        while time.perf_counter() < end:
            with contextlib.suppress(OSError, IndexError, ValueError):
                await ask(server.port, request("/v1/completions", BODY, KEYS[0], closes=True))

    async def victim(end: float) -> None:
        await asyncio.sleep(1)
        while time.perf_counter() < end:
            start = time.perf_counter()
            status, answer = await ask(server.port, request("/v1/completions", BODY, KEYS[1], closes=True))
            latencies.append(time.perf_counter() - start)
            if status != 200:
                refused.append(f"{status} {json.dumps(answer)[:60]}")

    async def run() -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(victim(end), *(crowd(end) for _ in range(num_connections)))

    asyncio.run(run())
    fault = f"{num_connections} connections of one key: another key's requests"
    yield none_of(fault, refused, len(latencies), "refused")
    note = f"median {statistics.median(latencies):.2f} s"
    yield at_most("the same: the slowest of another key", max(latencies), 1.5, "s", note, is_timed=True)


def other(server: Server) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[1]}"}


def cached_tokens(server: Server, headers: dict[str, str] | None = None) -> int:
    body = {"text": SECRET, "sampling_params": {"max_new_tokens": 1}}
    answer = server.http.post("/generate", json=body, headers=headers).json()
    return int(answer["meta_info"]["cached_tokens"])


def separate_caches(server: Server) -> Figure:
    """A key finds nothing of another's prefix, and its flush leaves it."""
    cached_tokens(server)
    failures = [] if cached_tokens(server) > 0 else ["the own prefix is not cached"]
    failures += [] if cached_tokens(server, other(server)) == 0 else ["another key found the prefix"]
    server.http.post("/flush_cache", headers=other(server))
    failures += [] if cached_tokens(server) > 0 else ["another key's flush removed the prefix"]
    return none_of("a key's prefix cache: hits and flushes of another", failures, 3, "crossed")


def separate_aborts(server: Server) -> Figure:
    """`abort_all` of another key leaves a stream running."""
    stream, _ = open_stream(server.port, LONG, server.key)
    server.http.post("/abort_request", json={"abort_all": True}, headers=other(server))
    time.sleep(0.5)
    failures = [] if server.counts()["running_calls"] else ["the stream ended"]
    reset(stream)
    return none_of("abort_all of another key: streams", failures, 1, "aborted")


def timing_of_keys(server: Server, count: int) -> Iterator[Figure]:
    """401 for a wrong key: with the first letters of a key, and with others. In random order; lower deciles."""
    wrong = {"similar": KEYS[0][:-1] + "x", "different": "x" * len(KEYS[0])}
    times: dict[str, list[float]] = {name: [] for name in wrong}
    failures = []
    with httpx.Client(base_url=server.address, timeout=20, verify=False) as http:
        for name in random.Random(1).sample([*wrong] * count, 2 * count):
            start = time.perf_counter()
            code = http.get("/v1/models", headers={"authorization": f"Bearer {wrong[name]}"}).status_code
            times[name].append(time.perf_counter() - start)
            failures += [] if code == 401 else [str(code)]
    yield none_of("wrong keys", failures, 2 * count, "admitted")
    similar, different = (1e6 * sorted(values)[len(values) // 10] for values in times.values())
    spread, difference = f"of {different:.0f} us", abs(similar - different)
    yield at_most(
        "a wrong key that begins like a right one: 401 later by", difference, 100, "us", spread, is_timed=True
    )
