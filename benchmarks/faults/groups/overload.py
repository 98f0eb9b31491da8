"""Ten times the load that a server can serve: time to first token, refusals, goodput, recovery.

The peak is measured first, with 48 clients that send one request after the other. Then the load is open: requests
arrive at random, whether or not earlier ones were answered. It rises from 0.9 of the peak to ten times the peak and
falls to half of it, without a pause. The time to the first token is measured on the idle server, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from common.http import request, send
from faults.figures import Figure, Scale, at_most
from faults.served import serve

MAX_QUEUE_TIME_S = 1.0
FACTOR = 10.0  # the load over the peak
NUM_CLIENTS, WARM_UP_S = 48, 4  # at the peak
NORMAL = 2  # times the 99th percentile of the reference: a longer time to the first token is not normal
WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"]


class Answer(NamedTuple):
    """The answer to one request; times of time.perf_counter(). first: of the first token."""

    sent: float
    status: int
    first: float
    end: float
    retry_after_s: int


def inflict(scale: Scale) -> Iterator[Figure]:
    """The client runs on the last core and the server on the others, so that the client costs it nothing."""
    cores, priority = sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.sched_setaffinity(0, cores[:-1] or cores)  # inherited by the server and its runtime
        with serve("--drain-timeout=0", f"--max-queue-time={MAX_QUEUE_TIME_S}") as server:
            os.sched_setaffinity(0, cores[-1:])
            with contextlib.suppress(PermissionError):  # a client that waits for its core reads late
                os.setpriority(os.PRIO_PROCESS, 0, -10)
            figures, num_errors = asyncio.run(overloaded(Load(server.port), scale.count(20, 5)))
            num_errors += server.complete().status_code != 200
    finally:
        os.sched_setaffinity(0, cores)
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    yield from figures
    yield at_most("the same: answers other than 200, 429, 503", num_errors, 0, "")


class Load:
    """Sends requests with random prompts, one connection each."""

    def __init__(self, port: int) -> None:
        self.port, self.draw = port, random.Random(1)

    async def ask(self) -> Answer:
        prompt = " ".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(20, 60)))
        body = {"model": "default", "prompt": prompt, "max_tokens": self.draw.randint(8, 24), "ignore_eos": True}
        sent, first = time.perf_counter(), 0.0
        reader, writer = await send(self.port, request("/v1/completions", body | {"stream": True}, closes=True))
        try:
            headers = await reader.readuntil(b"\r\n\r\n")
            while await reader.read(65536):
                first = first or time.perf_counter()
        finally:
            writer.close()
        retry_after = re.search(rb"retry-after: (\d+)", headers.lower())
        seconds = int(retry_after[1]) if retry_after else 0
        return Answer(sent, int(headers.split()[1]), first, time.perf_counter(), seconds)

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


def first_token(answers: list[Answer], part: float = 0.99) -> float:
    """A percentile of the time to the first token."""
    return percentile([answer.first - answer.sent for answer in answers if answer.status == 200], part)


def served_per_second(answers: list[Answer], start: float, seconds: float) -> float:
    """The parts of answers that arrived in these seconds, if an answer's tokens arrive evenly from the first one on.

    An answer that began before, or is not complete at the end, counts as its part.
    """
    parts = (
        max(0.0, min(answer.end, start + seconds) - max(answer.first, start)) / max(answer.end - answer.first, 1e-9)
        for answer in answers
        if answer.status == 200
    )
    return sum(parts) / seconds


async def overloaded(load: Load, seconds: int) -> tuple[list[Figure], int]:
    """The figures of the times, and the number of answers other than 200, 429 and 503."""
    idle_s = first_token([await load.ask() for _ in range(20)][5:], 0.5)
    start = time.perf_counter() + WARM_UP_S
    answers = await load.closed(WARM_UP_S + seconds + 1, NUM_CLIENTS)  # the last second is not counted: clients end
    peak = served_per_second(answers, start, seconds)
    peak_p99_s = first_token([answer for answer in answers if answer.sent >= start])
    normal_tasks = await load.open(seconds, 0.9 * peak)
    start = time.perf_counter()
    tasks = await load.open(seconds, FACTOR * peak)
    end = time.perf_counter()
    after = await asyncio.gather(*await load.open(10, 0.5 * peak))
    normal, overload = await asyncio.gather(*normal_tasks), await asyncio.gather(*tasks)
    normal_p99_s = first_token(normal)
    goodput = 100 * served_per_second([*normal, *overload, *after], start, seconds) / peak
    late_s = [a.sent - end for a in after if a.status != 200 or a.first - a.sent > NORMAL * normal_p99_s]
    refusals_s = [answer.end - answer.sent for answer in overload if answer.status != 200]
    low, high = min(refusals_s, default=0.0), percentile(refusals_s, 0.99)

    fault = f"ten times the peak load for {seconds} s, --max-queue-time {MAX_QUEUE_TIME_S:g}: time to first token, p99"
    limit_s, most_s = round(MAX_QUEUE_TIME_S + idle_s, 3), MAX_QUEUE_TIME_S + 0.1
    note, is_prompt = f"at the peak {peak_p99_s:.2f} s, at 0.9 of it {normal_p99_s:.2f} s", low >= MAX_QUEUE_TIME_S
    refusals, measured = f"{MAX_QUEUE_TIME_S:g} to {most_s:g} s", f"{low:.3f}, {high:.3f} s"
    figures = [
        at_most(fault, first_token(overload), limit_s, "s", note, is_timed=True),
        Figure("the same: a refusal (least, p99)", refusals, measured, is_prompt and high <= most_s, is_timed=True),
        Figure("the same: goodput", ">= 90 % of the peak", f"{goodput:.0f} %", goodput >= 90, is_timed=True),
        at_most("the same: normal after its end", max(late_s, default=0.0), 5, "s", is_timed=True),
    ]
    return figures, sum(answer.status not in (200, 429, 503) for answer in [*overload, *after])
