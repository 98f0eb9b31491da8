"""Clients that leave: streams, and programs over HTTP with forks; programs beyond their limits; a drain of programs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from common.http import LONG, ask, connect, head, last_error, open_stream, read_all, request, reset, send
from faults.figures import Figure, Scale, at_most, wait_until
from faults.served import KEYS, Server, serve

GEN = {"gen": {"max_tokens": 2000, "ignore_eos": True}}
NUM_CLIENTS, STAY_S = 48, 2.0  # of the programs, whose clients leave at a random time up to the latter
POLL_S = 0.002
GIVE_UP_S = 60.0


def forked_program(branches: int) -> list[dict[str, Any]]:
    """A program with `branches` branches with calls; every third of them forks again."""
    nodes = []
    for index in range(0, branches, 3):
        last = [GEN] if branches - index < 3 else [{"fork": {"branches": [[GEN, GEN]]}}]
        nodes += [[{"text": f" {index + i}"}, GEN] for i in range(min(2, branches - index))] + [last]
    return [{"text": "Once"}, {"fork": {"branches": nodes[:branches]}}, {"text": "Then"}, GEN]


def inflict(scale: Scale) -> Iterator[Figure]:
    with serve("--max-queue=512", has_keys=True) as server:
        canaries = server.canaries()
        yield from programs_left(server, scale)
        yield from streams_left(server, scale)
        yield server.same_answers("the same, the answers afterwards", canaries)
    with serve("--max-queue=64", "--max-requests-per-key=4", "--drain-timeout=1", has_keys=True) as server:
        yield from programs_beyond_limits(server)
        yield from drained_program(server)


def programs_left(server: Server, scale: Scale) -> Iterator[Figure]:
    count = scale.count(400, 40)
    ended_ms, held, other_ms = asyncio.run(left(server, count))
    fault = f"{count} programs of 6 branches whose clients leave"
    yield at_most(f"{fault}: calls end", ended_ms, 250, "ms", is_timed=True)
    yield at_most(f"{fault}: pages and requests left", held, 0, "")
    worst = max(other_ms, default=float("inf"))
    served = f"{len(other_ms)} of its requests served meanwhile; this is the slowest"
    yield at_most(f"{fault}: another key is served", worst, 5000, "ms", served, is_timed=True)


async def left(server: Server, count: int) -> tuple[float, int, list[float]]:
    """What programs leave whose clients disconnect: ms until their calls end, pages and requests, ms of another key."""
    other_ms: list[float] = []
    ended = asyncio.Event()
    meanwhile = asyncio.create_task(serve_other_key(server, other_ms, ended))
    await depart(server, count)
    last, status = time.perf_counter(), await status_of(server)
    ended.set()
    while status["runtime"]["running_calls"] or status["runtime"]["waiting_calls"]:
        if time.perf_counter() - last > GIVE_UP_S:
            break
        await asyncio.sleep(POLL_S)
        status = await status_of(server)
    ended_ms, counts = 1000 * (time.perf_counter() - last), status["runtime"]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(meanwhile, GIVE_UP_S)
    lost = counts["total_pages"] - counts["free_pages"] - counts["cached_pages"]  # the used ones among them
    return ended_ms, lost + (await status_of(server))["in_flight"], other_ms


async def status_of(server: Server) -> dict[str, Any]:
    return (await ask(server.port, head("/status", 0, server.key, "GET", closes=True)))[1]


async def depart(server: Server, count: int) -> None:
    """Sends all programs, NUM_CLIENTS at a time, and leaves them. A refused one is sent again."""
    numbers, draw = iter(range(count)), random.Random(1)

    async def one_client() -> None:
        for number in numbers:
            body = {"program": forked_program(6), "stream": number % 2 == 0}
            stay_s = draw.uniform(0, STAY_S)
            while await leave(server, body, stay_s) in (429, 503):
                await asyncio.sleep(0.02)

    await asyncio.gather(*(one_client() for _ in range(NUM_CLIENTS)))


async def leave(server: Server, body: dict[str, Any], stay_s: float) -> int:
    """Disconnects after `stay_s` seconds. Returns the status that arrived before, 0 if none did."""
    reader, writer = await send(server.port, request("/v1/programs", body, server.key))
    await writer.drain()
    answer = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(stay_s):
            answer = await reader.read(64)
            if answer.startswith(b"HTTP/1.1 200"):
                await reader.read()
    writer.transport.abort()
    return int(answer.split()[1]) if answer else 0


async def serve_other_key(server: Server, latencies_ms: list[float], until: asyncio.Event) -> None:
    body = {"model": "default", "prompt": "One, two,", "max_tokens": 4}
    while not until.is_set():
        start = time.perf_counter()
        status, _ = await ask(server.port, request("/v1/completions", body, KEYS[1], closes=True))
        if status == 200:
            latencies_ms.append(1000 * (time.perf_counter() - start))
        await asyncio.sleep(0.05)


def streams_left(server: Server, scale: Scale) -> Iterator[Figure]:
    times = []
    count = scale.count(200, 10)
    for _ in range(count):
        connection, _ = open_stream(server.port, LONG, server.key)
        reset(connection)
        times.append(1000 * wait_until(lambda: not server.counts()["running_calls"], 10))
    yield at_most(f"{count} streams left after their first token: calls end", max(times), 250, "ms", is_timed=True)
    counts = server.counts()
    lost = counts["total_pages"] - counts["free_pages"] - counts["cached_pages"]
    yield at_most("the same: pages not freed", lost, 0, "")


def programs_beyond_limits(server: Server) -> Iterator[Figure]:
    """40 programs of 126 branches beyond the limits of their key, whose clients hang up at once."""
    body = {"program": [{"text": "Once"}, {"fork": {"branches": [[GEN]] * 126}}], "stream": True}
    most_waiting = 0
    for _ in range(40):
        connection = connect(server.port)
        connection.sendall(request("/v1/programs", body, server.key))
        reset(connection)
        most_waiting = max(most_waiting, server.counts()["waiting_calls"])
    yield at_most("40 programs of 126 branches, a key's limit being 4: calls waiting", most_waiting, 4, "calls")
    yield at_most("the same: the key is served again", server.seconds_to_serve(), 2, "s", is_timed=True)


def drained_program(server: Server) -> Iterator[Figure]:
    """SIGTERM while a forked program streams, which lasts longer than --drain-timeout."""
    program = {"program": forked_program(2), "stream": True}
    connection = connect(server.port, timeout_s=60)
    connection.sendall(request("/v1/programs", program, server.key))
    received = [connection.recv(4096)]
    reader = threading.Thread(target=lambda: received.append(read_all(connection, 30)), daemon=True)
    reader.start()
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    reader.join(40)
    code = last_error(b"".join(received))
    kept = code == "aborted" and server.process.wait(30) == 0
    outcome = f"{code or 'cut'}, exit code {server.process.wait(30)}"
    yield Figure("SIGTERM while a program streams", "its error event, exit code 0", outcome, kept)
