"""One stream through the language and through HTTP, beside the step alone; and gaps between tokens after a start.

    python benchmarks/whole_way.py [--model FILE] [--rounds 3] [--seconds 10] [--constraint] [--warm]

`cpu_models.py` measures the same for its models, with the step alone in turn. A runtime starts, and one stream after
the other is read from it for `--seconds` from ready on: printed are the seconds to ready and to the first token, the
processor seconds of both processes, the median gap, the 99.9th percentile over the median, and the longest gap with
its time. `--constraint`: a constrained call begins beside the second stream. `--warm`: with `warm_constraints`, as
servers start. A second round finds kernels and packed weights on disk.

Then streams through the language and through `plait serve`, which this program reads with httpx, print each token
(to /dev/null). Drafts are off, so that a token is a step. The processor time a token of each process is printed too,
which other work on the machine disturbs less than the clock. Run it with nothing else on the machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import httpx
from common.options import parsed
from common.processes import CpuTimer, ended, free_port

import plait
from plait import gen

SERVE = """
import sys
from plait.runtime.process.runtime import Runtime
from plait.runtime.server import serve
from plait.runtime.server.engines import restarting_runtime
from plait.runtime.server.settings import server_settings
restarting_runtime.Runtime = lambda model, **settings: Runtime.connect(sys.argv[1])
sys.exit(serve.serve(None, server_settings(port=int(sys.argv[2]))))
"""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-f]{3,9}x$"}}}
PROMPT, TOKENS = "word " * 140 + "Once upon a time", 100  # a token of the middle stands after 200, as in cpu_models


@plait.function
def story(s: Any) -> None:
    s += PROMPT + gen("text", max_tokens=TOKENS, ignore_eos=True, temperature=0)


@plait.function
def named(s: Any) -> None:
    s += "In JSON: " + gen("value", json_schema=SCHEMA, max_tokens=40)


def main() -> None:
    options = parsed(__doc__, model=None, rounds=3, seconds=10.0, constraint=False, warm=False)
    print("| ready | first token | processor | median gap | p99.9 / median | longest gap |")
    print("| --- | --- | --- | --- | --- | --- |")
    for _ in range(options.rounds):
        began, cpu_before = time.perf_counter(), processor_s()
        with plait.Runtime(options.model, progress=False, drafts=[], warm_constraints=options.warm) as runtime:
            row = first_gaps(runtime, began, options.seconds, options.constraint)
        print(row.format(cpu=processor_s() - cpu_before), flush=True)
    with WholeWay.started(options.model) as way:
        for _ in range(options.rounds):
            print(f"language {way.language():.1f} tok/s, {way.costs()}; ", end="")
            print(f"HTTP {way.http():.1f} tok/s, {way.costs()}", flush=True)


def first_gaps(runtime: plait.Runtime, began: float, seconds: float, with_constraint: bool = False) -> str:
    """Reads streams for `seconds` and returns a row of the table, without the processor time."""
    ready, arrivals, constrained = time.perf_counter(), list[list[float]](), None
    while time.perf_counter() < ready + seconds:
        arrivals.append(print_all(story.run(backend=runtime, stream=True).text_iter("text")))
        if with_constraint and constrained is None:
            constrained = named.run(backend=runtime, stream=True)
    gaps = sorted((b - a, a - ready) for times in arrivals for a, b in pairwise(times))
    median = statistics.median(gap for gap, _ in gaps)
    high, (longest, at) = gaps[int(0.999 * len(gaps))][0], gaps[-1]
    return (
        f"| {ready - began:.2f} s | {arrivals[0][0] - began:.2f} s | {{cpu:.1f}} s | {1000 * median:.1f} ms "
        f"| {high / median:.1f} | {1000 * longest:.0f} ms, {at:.1f} s after ready |"
    )


@contextlib.contextmanager
def server(address: str) -> Iterator[tuple[int, int]]:
    """Starts a server in front of a runtime. Yields its port and process id."""
    port, quiet = free_port(), subprocess.DEVNULL
    command = [sys.executable, "-c", SERVE, address, str(port)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, stdin=subprocess.PIPE)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield port, process.pid


class WholeWay:
    """A runtime, and a server in front of it. This process is the client of both."""

    def __init__(self, runtime: plait.Runtime, url: str, cpus: dict[str, CpuTimer]) -> None:
        self._runtime, self._cpus = runtime, cpus
        self._http = httpx.Client(base_url=url, timeout=600)
        self._name = self._http.get("/v1/models").json()["data"][0]["id"]

    @classmethod
    @contextlib.contextmanager
    def started(cls, model: str | None, seconds: float = 0.0) -> Iterator[WholeWay]:
        """Starts both. `seconds`: how long the gaps of the start are measured before; see `gaps`."""
        began = time.perf_counter()
        with plait.Runtime(model, progress=False, drafts=[]) as runtime:
            gaps = first_gaps(runtime, began, seconds).split("|")[-3:-1] if seconds else []
            with server(runtime.address) as (port, pid):
                pids = {"client": os.getpid(), "runtime": runtime.pid, "server": pid}
                way = cls(runtime, f"http://127.0.0.1:{port}", {name: CpuTimer(of) for name, of in pids.items()})
                way.gaps = ",".join(gaps)
                way.language(), way.http()
                yield way

    gaps = ""  # of the start: the 99.9th percentile over the median, and the longest one with its time

    def language(self) -> float:
        """Returns the tokens a second of one stream through the language."""
        return self._rate(lambda: story.run(backend=self._runtime, stream=True).text_iter("text"))

    def http(self) -> float:
        """Returns the tokens a second of one stream through the server."""
        body = {"model": self._name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
            answer.raise_for_status()
            return self._rate(lambda: (line for line in answer.iter_lines() if '"text"' in line))

    def _rate(self, stream: Callable[[], Iterable[str]]) -> float:
        for cpu in self._cpus.values():
            cpu.read()
        arrivals = print_all(stream())
        self._spent = {name: cpu.read() / TOKENS for name, cpu in self._cpus.items()}
        return (TOKENS - 1) / (arrivals[-1] - arrivals[0])

    def costs(self) -> str:
        """The processor time of each process for a token of the latest stream."""
        return ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in self._spent.items())


def print_all(stream: Iterable[str]) -> list[float]:
    """Prints each piece of a stream as it arrives; returns the times."""
    times = []
    with open(os.devnull, "w") as terminal:
        for piece in stream:
            print(piece, end="", flush=True, file=terminal)
            times.append(time.perf_counter())
    return times


def processor_s() -> float:
    """Returns the processor seconds of this process and of those that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
