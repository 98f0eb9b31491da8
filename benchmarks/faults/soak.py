"""A soak: normal requests with known answers, of which about one in a hundred is a fault instead.

Every normal answer is compared with the first one, bit by bit. Within the server, steps, the sampler, masks, pages and
the log fail at random (`injection/`). A failed mask ends its request with an error that names the failure; the other
failures change no answer. The scheduler is killed once, after a third of the time, so that the memory of the next one
can be compared over the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from faults import soak_faults
from faults.figures import Figure, at_most, none_of, wait_until
from faults.served import Server, serve

from plait.runtime.errors import PlaitError

INJECTION = Path(__file__).parent / "injection"
NUM_CLIENTS = 6
FAULT_SHARE = 0.01
GEN = {"max_tokens": 8, "ignore_eos": True, "temperature": 1, "seed": 3}
SAMPLED = {"max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BRANCHES = [[{"text": " and"}, {"gen": GEN}], [{"text": " or"}, {"gen": GEN}]]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "default", "prompt": f"Tale {number}:", **SAMPLED}) for number in range(4)
]
REQUESTS += [
    ("/v1/completions", {"model": "default", "prompt": "Count: one, two,", **SAMPLED, "stream": True, "n": 2}),
    ("/v1/completions", {"model": "default", "prompt": "The cat sat. " * 120, **SAMPLED, "max_tokens": 4}),
    ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "Hi"}], **SAMPLED}),
    (
        "/v1/chat/completions",
        {"model": "default", "messages": [{"role": "user", "content": "A name"}], **SAMPLED, "response_format": FORMAT},
    ),
    ("/v1/programs", {"program": [{"text": "Animals"}, {"gen": GEN}, {"fork": {"branches": BRANCHES}}, {"gen": GEN}]}),
]


def is_busy(answer: httpx.Response) -> bool:
    """Whether the queue is full, or the compiler of a constraint got no processor time."""
    return answer.json()["error"]["code"] in ("queue_full", "overloaded")


class Soak:
    """The clients of one server, what they counted, and the memory of its processes over time."""

    def __init__(self, server: Server, seconds: float, injected: Path) -> None:
        self.server, self.draw, self.injected = server, random.Random(1), injected
        self.start, self.end = time.monotonic(), time.monotonic() + seconds
        self.kill_at = self.start + seconds / 3
        self.expected: list[str] = []
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.killed_at = float("inf")
        self.memory: list[tuple[float, dict[str, float]]] = []

    async def ask(self, http: httpx.AsyncClient, number: int) -> str:
        """The generated part of an answer, without ids and times; of an error, its body."""
        path, body = REQUESTS[number]
        answer = await http.post(path, json=body)
        while answer.status_code == 503 and is_busy(answer) and time.monotonic() < self.end:
            self.counts["503 with Retry-After"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))
            answer = await http.post(path, json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text}"
        if body.get("stream"):
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            parts: dict[int, str] = {}
            for event in map(json.loads, events):
                if "error" in event:
                    return json.dumps(event)
                for choice in event["choices"]:
                    parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
            return json.dumps(parts, sort_keys=True)
        content = answer.json()
        return json.dumps(content["choices"] if "choices" in content else content["text"], sort_keys=True)

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            if self.draw.random() < FAULT_SHARE:
                name, inflict = self.draw.choice(list(soak_faults.FAULTS.items()))
                self.counts[f"fault: {name}"] += 1
                with contextlib.suppress(OSError, psutil.Error, httpx.HTTPError, PlaitError, ValueError):  # the kill
                    await asyncio.to_thread(inflict, self.server, self.draw)
                continue
            number, start = self.draw.randrange(len(REQUESTS)), time.monotonic()
            try:
                outcome = await self.ask(http, number)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.counts["requests"] += 1
            if outcome == self.expected[number]:
                self.counts["equal"] += 1
            elif "injected: " in outcome:
                self.counts["errors that name an injected failure"] += 1
            elif "runtime_gone" in outcome and REQUESTS[number][1].get("stream") and start <= self.killed_at + 1:
                self.counts["streams that began before the kill, with their error"] += 1
            else:
                self.lost.append(f"{REQUESTS[number][0]} after {start - self.start:.0f} s: {outcome[:90]}")

    async def watch(self) -> None:
        """Kills the scheduler once, and samples the memory."""
        while time.monotonic() < self.end:
            if time.monotonic() >= self.kill_at and self.killed_at == float("inf"):
                self.killed_at = time.monotonic()
                self.server.runtime().kill()
                await asyncio.sleep(15)
            with contextlib.suppress(psutil.Error, ValueError):
                self.memory.append((time.monotonic(), self.server.memory()))
            await asyncio.sleep(2)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        url = self.server.address
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, verify=False) as http:
            self.expected = [await self.ask(http, number) for number in range(len(REQUESTS))]
            (self.injected / "active").touch()
            await asyncio.gather(self.watch(), *(self.client(http) for _ in range(NUM_CLIENTS)))

    def growth(self, name: str) -> tuple[float, float]:
        """(median memory in the fifth after the warm-up, in the last fifth), in MiB. The warm-up is a fifth as well
        and begins with the kill, since the HTTP process also takes memory once for the next runtime."""
        samples = [memory[name] for at, memory in self.memory if at > self.killed_at + 15]
        fifth = max(1, len(samples) // 5)
        first, last = sorted(samples[fifth : 2 * fifth] or samples), sorted(samples[-fifth:])
        return first[len(first) // 2], last[len(last) // 2]

    def series(self, name: str) -> str:
        """The memory after each tenth of the time, in MiB: whether it levels off, or goes on growing."""
        samples = [memory[name] for _, memory in self.memory]
        return ", ".join(f"{samples[len(samples) * tenth // 10 - 1]:.1f}" for tenth in range(1, 11) if len(samples) > 9)


@contextlib.contextmanager
def failing_server() -> Iterator[tuple[Server, Path]]:
    """A server whose parts fail at random, and the folder that counts the failures."""
    with tempfile.TemporaryDirectory(prefix="plait-injected-") as folder:
        path = os.pathsep.join(filter(None, [str(INJECTION), os.environ.get("PYTHONPATH")]))
        with serve("--deterministic", environment={"PYTHONPATH": path, "PLAIT_FAULT_FOLDER": folder}) as server:
            yield server, Path(folder)


def soak(minutes: float) -> Iterator[Figure]:
    with failing_server() as (server, injected):
        run = Soak(server, 60 * minutes, injected)
        asyncio.run(run.run())
        (injected / "active").unlink()
        idle = wait_until(server.is_idle, 60)
        num_tracebacks = server.num_tracebacks()
        num_injected = {file.name: file.stat().st_size for file in sorted(injected.iterdir())}
    num_faults = sum(count for name, count in run.counts.items() if name.startswith("fault"))
    kinds = ", ".join(
        f"{name.removeprefix('fault: ')} {n}" for name, n in run.counts.items() if name.startswith("fault")
    )
    fault = f"{minutes:g} minutes, {num_faults} faults ({kinds}) and a SIGKILL of the scheduler"
    told = sum(count for name, count in run.counts.items() if name.startswith("streams"))
    yield none_of(f"{fault}: answers", run.lost, run.counts["requests"], "lost or different")
    errors, num_masks = run.counts["errors that name an injected failure"], num_injected.get("mask", 0)
    failures = ", ".join(f"{name} {count}" for name, count in num_injected.items())
    yield at_most(f"the same: failures within the server ({failures}): errors", errors, num_masks, "failed masks")
    busy = run.counts["503 with Retry-After"]
    yield Figure("the same: refused because the machine is busy", "asked again", f"{busy} refusals", True)
    yield Figure("the same: streams cut by the kill", "their error", f"{told} of {told}", True)
    for name in ("http", "runtime", "compile"):
        first, last = run.growth(name)
        note = f"{first:.1f} to {last:.1f} MiB"
        if name == "runtime":
            pool = run.growth("KV pool")
            note += f", without the KV pool, of which {pool[0]:.0f} to {pool[1]:.0f} MiB have been used"
            note += f"; after each tenth {run.series(name)}"
        yield at_most(f"the same: memory of {name}, after warm-up to the end", 100 * (last / first - 1), 1, "%", note)
    yield at_most("the same: no call, page or request left after", idle, 35, "s")
    yield at_most("the same: tracebacks in the log", num_tracebacks, 0, "")
