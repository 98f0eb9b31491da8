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
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from faults.figures import Figure, at_most, none_of, wait_until
from faults.served import Server, serve
from faults.soak_faults import FAULTS

INJECTION = Path(__file__).parent / "injection"
NUM_CLIENTS, FAULT_SHARE = 6, 0.01
GEN = {"max_tokens": 8, "ignore_eos": True, "temperature": 1, "seed": 3}
SAMPLED = {"model": "default", "max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BRANCHES = [[{"text": " and"}, {"gen": GEN}], [{"text": " or"}, {"gen": GEN}]]
CHAT, COMPLETIONS, NAME = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "A name"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((COMPLETIONS, {**SAMPLED, "prompt": f"Tale {number}:"}) for number in range(4)),
    (COMPLETIONS, {**SAMPLED, "prompt": "Count: one, two,", "stream": True, "n": 2}),
    (COMPLETIONS, {**SAMPLED, "prompt": "The cat sat. " * 120, "max_tokens": 4}),
    (CHAT, {**SAMPLED, "messages": NAME}),
    (CHAT, {**SAMPLED, "messages": NAME, "response_format": FORMAT}),
    ("/v1/programs", {"program": [{"text": "Animals"}, {"gen": GEN}, {"fork": {"branches": BRANCHES}}, {"gen": GEN}]}),
]
BUSY = ("queue_full", "overloaded")  # the queue is full, or the compiler of a constraint got no processor time


class Soak:
    """The clients of one server, what they counted, and the memory of its processes over time."""

    def __init__(self, server: Server, seconds: float, injected: Path) -> None:
        self.server, self.draw, self.injected = server, random.Random(1), injected
        self.start, self.end = time.monotonic(), time.monotonic() + seconds
        self.kill_at, self.killed_at = self.start + seconds / 3, float("inf")
        self.expected: list[str] = []
        self.counts, self.faults, self.lost = Counter[str](), Counter[str](), list[str]()
        self.memory: list[tuple[float, dict[str, float]]] = []

    async def ask(self, http: httpx.AsyncClient, number: int) -> str:
        """The generated part of an answer, without ids and times; of an error, its body."""
        path, body = REQUESTS[number]
        answer = await http.post(path, json=body)
        while answer.status_code == 503 and answer.json()["error"]["code"] in BUSY and time.monotonic() < self.end:
            self.counts["busy"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))
            answer = await http.post(path, json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text}"
        if body.get("stream"):
            parts = dict[int, str]()
            for event in (json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")):
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
                name, inflict = self.draw.choice(list(FAULTS.items()))
                self.faults[name] += 1
                with contextlib.suppress(OSError, psutil.Error, httpx.HTTPError, ValueError):  # the kill
                    await asyncio.to_thread(inflict, self.server, self.draw)
                continue
            number, start = self.draw.randrange(len(REQUESTS)), time.monotonic()
            try:
                outcome = await self.ask(http, number)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.counts["requests"] += 1
            is_cut = "runtime_gone" in outcome and REQUESTS[number][1].get("stream") and start <= self.killed_at + 1
            if "injected: " in outcome:
                self.counts["injected"] += 1
            elif is_cut:
                self.counts["cut"] += 1
            elif outcome != self.expected[number]:
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
        async with httpx.AsyncClient(base_url=self.server.address, timeout=120, limits=limits) as http:
            self.expected = [await self.ask(http, number) for number in range(len(REQUESTS))]
            (self.injected / "active").touch()
            await asyncio.gather(self.watch(), *(self.client(http) for _ in range(NUM_CLIENTS)))
        (self.injected / "active").unlink()

    def growth(self, name: str) -> tuple[float, float]:
        """(median memory in the fifth after the warm-up, in the last fifth), in MiB. The warm-up is a fifth as well
        and begins with the kill, since the HTTP process also takes memory once for the next runtime."""
        samples = [memory[name] for at, memory in self.memory if at > self.killed_at + 15]
        fifth = max(1, len(samples) // 5)
        return statistics.median(samples[fifth : 2 * fifth] or samples), statistics.median(samples[-fifth:])


def soak(minutes: float) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="plait-injected-") as folder:
        path = os.pathsep.join(filter(None, [str(INJECTION), os.environ.get("PYTHONPATH")]))
        with serve("--deterministic", environment={"PYTHONPATH": path, "PLAIT_FAULT_FOLDER": folder}) as server:
            run = Soak(server, 60 * minutes, Path(folder))
            asyncio.run(run.run())
            idle = wait_until(server.is_idle, 60)
            num_tracebacks = server.num_tracebacks()
        injected = {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir())}
    kinds, failures = (", ".join(f"{name} {n}" for name, n in of.items()) for of in (run.faults, injected))
    fault = f"{minutes:g} minutes, {run.faults.total()} faults ({kinds}) and a SIGKILL of the scheduler"
    yield none_of(f"{fault}: answers", run.lost, run.counts["requests"], "lost or different")
    fault, num_masks = f"the same: failures within the server ({failures}): errors", injected.get("mask", 0)
    yield at_most(fault, run.counts["injected"], num_masks, "failed masks")
    yield Figure("the same: refused because the machine is busy", "asked again", f"{run.counts['busy']} refusals", True)
    yield Figure("the same: streams cut by the kill", "their error", f"{run.counts['cut']}", True)
    for name in ("http", "runtime", "compile"):
        first, last = run.growth(name)
        note = f"{first:.1f} to {last:.1f} MiB"
        if name == "runtime":
            used = "{:.0f} to {:.0f} MiB".format(*run.growth("KV pool"))
            note += f", without the KV pool, of which {used} have been used"
        yield at_most(f"the same: memory of {name}, after warm-up to the end", 100 * (last / first - 1), 1, "%", note)
    yield at_most("the same: no call, page or request left after", idle, 35, "s")
    yield at_most("the same: tracebacks in the log", num_tracebacks, 0, "")
