"""When short programs behind long ones finish, with the order "fair" and the order "first-come".

Simulates the two workloads of the Autellix paper (arXiv 2502.13965): a long *call* keeps its row for thousands of
steps, and a long *program* fills the queue with many short calls. The engine loop is the real one. The model only
advances a clock: a step takes `FIXED_S`, plus `ROW_S` for each decoding request and `TOKEN_S` for each prompt token,
as a small model does on two cores. So hours are simulated in seconds, and every run gives the same result.

    python benchmarks/scheduling.py [--shorts 200] [--rows 16]
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from common.options import parsed

from plait.constrained import CompilePool, Vocabulary
from plait.runtime.arrays import Float32Array
from plait.runtime.batch import request_metrics
from plait.runtime.config import engine_config
from plait.runtime.messages import PROTOCOL, Append, Close, Failed, Finished, Generate, Open, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.scheduler.policy import batching

FIXED_S, ROW_S, TOKEN_S = 0.012, 0.0006, 0.0008
PAGES, CONTEXT, VOCAB = 400_000, 16_384, 4096
WORKLOADS = ("long calls", "long programs")


@dataclass
class Program:
    """Starts at `start_s` with `threads` concurrent sessions of `turns` calls: `out` tokens after `prompt` tokens."""

    number: int
    kind: str
    start_s: float
    threads: int
    turns: int
    prompt: int
    out: int
    num_running: int = 0  # threads that have not finished
    ended: float = 0.0

    @property
    def tokens(self) -> int:
        return self.threads * self.turns * self.out


class Model:
    """A model runner that gives every token the same logits and advances the clock.

    `now`: the simulated time in seconds, which the scheduler reads in place of `time.monotonic`.
    """

    num_pages, max_batch_tokens, num_saved_reads, adapter_pool, now = PAGES, 256, 0, None, 0.0

    def monotonic(self) -> float:
        return self.now

    def forward(self, batch: Any) -> Float32Array:
        num_prompt_tokens = sum(row.count for row in batch.rows if row.count > 1)
        self.now += FIXED_S + ROW_S * len(batch.rows) + TOKEN_S * num_prompt_tokens
        return np.zeros((batch.num_logits, 1), np.float32)

    def argmax_tokens(self, hidden: Float32Array) -> tuple[list[float], list[int]]:
        return [1.0] * len(hidden), [1] * len(hidden)


class InMemoryTransport:
    """A transport that plays the programs: sends due messages, and a thread's next call when its last one has ended."""

    num_bad_frames, num_clients = 0, 1

    def __init__(self, model: Model, programs: list[Program]) -> None:
        self.model, self.num_left = model, len(programs)
        self.count, self.draw = itertools.count(1), random.Random(1)
        self.due: list[tuple[float, int, list[Any]]] = []
        self.threads: dict[int, tuple[Program, int, int]] = {}  # call id: (program, session, turns left after it)
        for program in programs:
            program.num_running = program.threads
            for _ in range(program.threads):
                session = next(self.count)
                self._ask(program, session, program.turns - 1, program.start_s, [Open(session, program=program.number)])

    def _ask(self, program: Program, session: int, left: int, at: float, before: list[Any]) -> None:
        call = next(self.count)
        self.threads[call] = program, session, left
        tokens = [self.draw.randrange(2, VOCAB) for _ in range(program.prompt)]
        sampling = sampling_params(max_tokens=program.out, temperature=0, ignore_eos=True)
        heapq.heappush(self.due, (at, call, [*before, Append(session, tokens), Generate(session, call, sampling)]))

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, Any]]:
        if timeout_s != 0.0 and self.due:  # nothing runs: advance to the next arrival
            self.model.now = max(self.model.now, self.due[0][0])
        received: list[tuple[bytes, Any]] = []
        while self.due and self.due[0][0] <= self.model.now:
            received += [(b"simulated", message) for message in heapq.heappop(self.due)[2]]
        return received

    def take_disconnected(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: Any) -> None:
        if isinstance(reply, Failed):
            raise RuntimeError(f"a call failed: {reply.text}")
        if not isinstance(reply, Finished):
            return
        program, session, left = self.threads.pop(reply.call)
        if left:
            self._ask(program, session, left - 1, self.model.now, [])
            return
        heapq.heappush(self.due, (self.model.now, next(self.count), [Close(session)]))
        program.num_running -= 1
        if not program.num_running:
            program.ended = self.model.now
            self.num_left -= 1


def simulate(programs: list[Program], order: str, max_rows: int) -> float:
    """Runs all programs, sets their `ended`, and returns when the last one ended, in simulated seconds."""
    model, sampler = Model(), Sampler()
    batching.time = request_metrics.time = model  # type: ignore[assignment]
    vocabulary = Vocabulary(tuple(b"%d " % i for i in range(VOCAB)), (0,), lambda text: [])
    config = engine_config(order=order, max_batch_rows=max_rows, prompt_lookup=False)
    welcome, transport = Welcome(PROTOCOL, "", VOCAB, CONTEXT, 0), InMemoryTransport(model, programs)
    engine_loop = EngineLoop(config, welcome, model, sampler, vocabulary, CompilePool(vocabulary), transport)  # type: ignore[arg-type]
    while transport.num_left:
        engine_loop.step()
    return model.now


def workload(name: str, num_shorts: int, max_rows: int) -> list[Program]:
    """Enough long programs at the start to take every row, then short programs of two calls at random times."""
    draw, numbers = random.Random(7), itertools.count(1)
    if name == "long calls":
        longs = [Program(next(numbers), "long", 0.0, 1, 1, 200, 8000) for _ in range(2 * max_rows)]
    else:
        longs = [Program(next(numbers), "long", 0.0, 8 * max_rows, 4, 100, 200) for _ in range(4)]
    work_s = sum(program.tokens for program in longs) / max_rows * (FIXED_S + ROW_S * max_rows)
    starts = sorted(draw.uniform(0.1, 0.7) * work_s for _ in range(num_shorts))
    return [*longs, *(Program(next(numbers), "short", at, 1, 2, 60, 40) for at in starts)]


def main() -> None:
    options = parsed(__doc__, shorts=200, rows=16)
    for name in WORKLOADS:
        means: dict[str, float] = {}
        for order in ("first-come", "fair"):
            programs = workload(name, options.shorts, options.rows)
            end = simulate(programs, order, options.rows)
            short, long = (
                [program.ended - program.start_s for program in programs if program.kind == kind]
                for kind in ("short", "long")
            )
            means[order] = statistics.mean(short)
            print(
                f"{name}, {order:10}: short programs {means[order]:7.1f} s (the worst {max(short):7.1f}), long ones "
                f"{statistics.mean(long):7.1f} s, {sum(program.tokens for program in programs) / end:6.1f} tokens/s",
                flush=True,
            )
        print(f"{name}: short programs finish {means['first-come'] / means['fair']:.1f} times sooner", flush=True)


if __name__ == "__main__":
    main()
