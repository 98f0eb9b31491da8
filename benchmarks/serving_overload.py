"""A server under ten times the load that it can serve: time to first token, refusals, goodput, recovery.

The peak is measured first, with 48 clients that send one request after the other. Then the load is open: requests
arrive at random, whether or not earlier ones were answered. It rises from 0.9 of the peak to ten times the peak and
falls to half of it, without a pause. The time to the first token is measured on the idle server, too. The faults of
overload measure it, with the client on a core of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from dataclasses import dataclass

WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"]
NUM_CLIENTS = 48  # at the peak
WARM_UP_S = 4
NORMAL = 2  # times the 99th percentile of the reference: a longer time to the first token is not normal


@dataclass
class Answer:
    """The answer to one request; times of time.perf_counter(). first: of the first token, or of a refusal's headers."""

    sent: float
    status: int
    first: float
    end: float
    retry_after_s: int


class Load:
    """Sends requests with random prompts, one connection each."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.draw = port, random.Random(seed)

    async def ask(self) -> Answer:
        prompt = " ".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(20, 60)))
        num_tokens = self.draw.randint(8, 24)
        fields = {"model": "default", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(fields)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sent = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head.encode() + body.encode())
            headers = await reader.readuntil(b"\r\n\r\n")
            status, first = int(headers.split()[1]), 0.0
            while await reader.read(65536):
                first = first or time.perf_counter()
        finally:
            writer.close()
        retry_after = [line for line in headers.lower().split(b"\r\n") if line.startswith(b"retry-after: ")]
        retry_after_s = int(retry_after[0].split()[1]) if retry_after else 0
        return Answer(sent, status, first, time.perf_counter(), retry_after_s)

    async def closed(self, seconds: float, num_clients: int) -> list[Answer]:
        """`num_clients` clients send one request after the other, and do as Retry-After says."""
        answers, end = [], time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                answers.append(await self.ask())
                await asyncio.sleep(answers[-1].retry_after_s)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return answers

    async def open(self, seconds: float, rate: float) -> list[asyncio.Task[Answer]]:
        """`rate` requests per second at random times. Returns them; the last ones still run."""
        due, end, tasks = time.perf_counter(), time.perf_counter() + seconds, []
        while (due := due + self.draw.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask()))
        return tasks


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def served_per_second(answers: list[Answer], start: float, seconds: float) -> float:
    """The parts of answers that arrived in these seconds, if an answer's tokens arrive evenly from the first one on.

    An answer that began before, or is not complete at the end, counts as its part. A slow machine has as many of these
    under way as it completes in some seconds.
    """
    end = start + seconds
    parts = (
        max(0.0, min(answer.end, end) - max(answer.first, start)) / max(answer.end - answer.first, 1e-9)
        for answer in answers
        if answer.status == 200
    )
    return sum(parts) / seconds


def first_token_p99(answers: list[Answer]) -> float:
    """The 99th percentile of the time to the first token."""
    return percentile([answer.first - answer.sent for answer in answers if answer.status == 200], 0.99)


@dataclass
class Overload:
    """What a load far above the peak did. Times in seconds."""

    goodput: float  # answers per second, of those at the peak
    p99_s: float
    idle_s: float  # of requests one after the other, the median
    peak_p99_s: float
    p99_below_peak_s: float  # at 0.9 of the peak
    refusal_min_s: float
    refusal_p99_s: float
    recovery_s: float
    num_errors: int  # answers other than 200, 429 and 503


async def measure(port: int, seconds: float, factor: float, seed: int) -> Overload:
    load = Load(port, seed)
    idle = [await load.ask() for _ in range(20)]
    idle_s = percentile([answer.first - answer.sent for answer in idle[5:]], 0.5)
    start = time.perf_counter() + WARM_UP_S
    answers = await load.closed(
        WARM_UP_S + seconds + 1, NUM_CLIENTS
    )  # the last second is not counted: clients end in it
    peak = served_per_second(answers, start, seconds)
    peak_p99 = first_token_p99([answer for answer in answers if answer.sent >= start])
    normal_tasks = await load.open(seconds, 0.9 * peak)
    start = time.perf_counter()
    tasks = await load.open(seconds, factor * peak)
    end = time.perf_counter()
    after = await asyncio.gather(*await load.open(10, 0.5 * peak))
    normal, overload = await asyncio.gather(*normal_tasks), await asyncio.gather(*tasks)
    p99_below_peak = first_token_p99(normal)
    rate = served_per_second([*normal, *overload, *after], start, seconds)
    p99 = first_token_p99(overload)
    late = [a.sent - end for a in after if a.status != 200 or a.first - a.sent > NORMAL * p99_below_peak]
    refusals = [answer.end - answer.sent for answer in overload if answer.status != 200]
    of_refusals = min(refusals, default=0.0), percentile(refusals, 0.99)
    num_errors = sum(answer.status not in (200, 429, 503) for answer in [*overload, *after])
    recovery_s = max(late, default=0.0)
    return Overload(rate / peak, p99, idle_s, peak_p99, p99_below_peak, *of_refusals, recovery_s, num_errors)


def take_priority() -> None:
    """Lets no other process delay this one, if that is permitted: a client that waits for its core reads late."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
