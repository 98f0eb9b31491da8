"""Forked programs whose clients disconnect: how fast a server is rid of them, and serves another key meanwhile.

Programs with nested forks are sent under one key; their clients disconnect at random moments, before or during the
answer. A refused program is sent again; its refusals are counted. The faults of programs measure it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass

GEN = {"gen": {"max_tokens": 2000, "ignore_eos": True}}
NUM_CLIENTS = 48
POLL_S = 0.002
GIVE_UP_S = 60.0


def forked_program(branches: int) -> list[dict]:
    """A program with `branches` branches with calls; every third of them forks again."""
    nodes = []
    for index in range(0, branches, 3):
        last = [GEN] if branches - index < 3 else [{"fork": {"branches": [[GEN, GEN]]}}]
        nodes += [[{"text": f" {index + i}"}, GEN] for i in range(min(2, branches - index))] + [last]
    return [{"text": "Once"}, {"fork": {"branches": nodes[:branches]}}, {"text": "Then"}, GEN]


class Client:
    """Sends requests under a key, on a connection per request."""

    def __init__(self, address: str, key: str) -> None:
        self.host, port = address.removeprefix("http://").split(":")
        self.port, self.key = int(port), key

    async def send(
        self, method: str, path: str, body: dict | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.key}\r\nconnection: close\r\n"
        )
        writer.write(
            f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        )
        return reader, writer

    async def ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
        """Returns the status and the body of an answer."""
        reader, writer = await self.send(method, path, body)
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), json.loads(content)

    async def leave(self, body: dict, stay_s: float) -> int:
        """Disconnects after `stay_s` seconds. Returns the status that arrived before, 0 if none did."""
        reader, writer = await self.send("POST", "/v1/programs", body)
        await writer.drain()
        head = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stay_s):
                head = await reader.read(64)
                if head.startswith(b"HTTP/1.1 200"):
                    await reader.read()
        writer.transport.abort()
        return int(head.split()[1]) if head else 0

    async def runtime(self) -> dict:
        return (await self.ask("GET", "/status"))[1]["runtime"]


async def depart(client: Client, options: argparse.Namespace) -> Counter[int]:
    """Sends all programs, NUM_CLIENTS at a time, and leaves them. Returns how often each status arrived."""
    statuses: Counter[int] = Counter()
    left, draw = iter(range(options.programs)), random.Random(options.seed)

    async def one_client() -> None:
        for number in left:
            body = {"program": forked_program(options.branches), "stream": number % 2 == 0}
            stay_s, status = draw.uniform(0, options.stay), 503
            while status in (429, 503):
                status = await client.leave(body, stay_s)
                statuses[status] += 1
                if status in (429, 503):
                    await asyncio.sleep(0.02)

    await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))
    return statuses


async def serve_other_key(client: Client, latencies: list[float], until: asyncio.Event) -> None:
    body = {"model": "default", "prompt": "One, two,", "max_tokens": 4}
    while not until.is_set():
        start = time.perf_counter()
        status, _ = await client.ask("POST", "/v1/completions", body)
        if status == 200:
            latencies.append(time.perf_counter() - start)
        await asyncio.sleep(0.05)


@dataclass
class Departures:
    """What was left of the programs after their last client had disconnected. Times in milliseconds."""

    statuses: Counter[int]
    programs_s: float
    ended_ms: float
    most_waiting: int
    counts: dict
    in_flight: int
    other_ms: list[float]
    other_ended_ms: float | None

    @property
    def lost_pages(self) -> int:
        known = sum(self.counts[name] for name in ("free_pages", "cached_pages", "used_pages"))
        return self.counts["total_pages"] - known


async def measure(address: str, options: argparse.Namespace) -> Departures:
    client, other = Client(address, "first-key"), Client(address, "second-key")
    latencies: list[float] = []
    ended = asyncio.Event()
    meanwhile = asyncio.create_task(serve_other_key(other, latencies, ended))
    start = time.perf_counter()
    statuses = await depart(client, options)
    last, programs_s = time.perf_counter(), time.perf_counter() - start
    ended.set()
    most_waiting, counts = 0, await client.runtime()
    served_after = None
    while counts["running_calls"] or counts["waiting_calls"]:
        most_waiting = max(most_waiting, counts["waiting_calls"])
        if time.perf_counter() - last > GIVE_UP_S:
            break
        await asyncio.sleep(POLL_S)
        counts = await client.runtime()
    elapsed_ms = 1000 * (time.perf_counter() - last)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(meanwhile, GIVE_UP_S)
        served_after = 1000 * (time.perf_counter() - last)
    in_flight = (await client.ask("GET", "/status"))[1]["in_flight"]
    served_ms = [1000 * latency for latency in latencies]
    return Departures(statuses, programs_s, elapsed_ms, most_waiting, counts, in_flight, served_ms, served_after)
