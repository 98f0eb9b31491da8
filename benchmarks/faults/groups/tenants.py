"""Keys beside each other: shares of the queue, caches, aborts, and the time that a key's check takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator

import httpx
from faults.figures import Figure, Scale, at_most, none_of
from faults.plain_http import LONG, open_stream, reset
from faults.served import KEYS, Server, serve
from program_departures import Client

BODY = {"model": "default", "prompt": "One, two,", "max_tokens": 8, "temperature": 0}
MAX_QUEUE_TIME_S = 5.0  # --max-queue-time
SECRET = "The secret of this tenant is long enough to be cached: " + "one two three four " * 20


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve(has_keys=True) as server:
        yield from crowded(server, scale.count(800, 100), scale.count(20, 5))
        yield separate_caches(server)
        yield separate_aborts(server)
        yield from timing_of_keys(server, scale.count(1500, 200))


def crowded(server: Server, num_connections: int, seconds: int) -> Iterator[Figure]:
    """One key keeps `num_connections` requests open; the other sends one after the other."""
    latencies: list[float] = []
    refused: list[str] = []

    async def crowd(client: Client, end: float) -> None:
        while time.perf_counter() < end:
            status = 0
            with contextlib.suppress(OSError, IndexError, ValueError):
                status, _ = await client.ask("POST", "/v1/completions", BODY)
            await asyncio.sleep(0 if status == 200 else 0.5)

    async def victim(client: Client, end: float) -> None:
        await asyncio.sleep(1)
        while time.perf_counter() < end:
            start = time.perf_counter()
            status, answer = await client.ask("POST", "/v1/completions", BODY)
            latencies.append(time.perf_counter() - start)
            if status != 200:
                refused.append(f"{status} {json.dumps(answer)[:60]}")

    async def run() -> None:
        end = time.perf_counter() + seconds
        many, one = Client(server.address, KEYS[0]), Client(server.address, KEYS[1])
        await asyncio.gather(victim(one, end), *(crowd(many, end) for _ in range(num_connections)))

    asyncio.run(run())
    fault = f"{num_connections} connections of one key: another key's requests"
    yield none_of(fault, refused, len(latencies), "refused")
    note = f"median {statistics.median(latencies):.2f} s"
    yield at_most(
        "the same: the slowest of another key", max(latencies), 2 * MAX_QUEUE_TIME_S, "s", note, is_timed=True
    )


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
