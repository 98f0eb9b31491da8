"""Short programs behind long ones: when they finish in the order "fair" and in the order "first-come".

The two situations that the Autellix paper (arXiv 2502.13965) tells of: a long *call* keeps its row for thousands of
steps, and a long *program* fills the queue with many short calls. The scheduler is the real one with all its parts; the
model is a clock: a step costs `FIXED_S`, a decoding row `ROW_S` and a prompt token `TOKEN_S` more, which is what a
small model takes on two cores. So hours pass in seconds, the same hours each time.

    python benchmarks/scheduling.py [--shorts 200] [--rows 16]

Knows: the scheduler's messages. Must not know: its policies.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from plait.constrained import CompilePool, Vocabulary
from plait.runtime.batch import request_metrics
from plait.runtime.config import engine_config
from plait.runtime.messages import PROTOCOL, Append, Close, Failed, Finished, Generate, Open, Welcome
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler import batching
from plait.runtime.scheduler.engine_loop import EngineLoop

FIXED_S, ROW_S, TOKEN_S = 0.012, 0.0006, 0.0008
CLIENT, VOCAB, PAGES, CONTEXT = b"simulated", 4096, 400_000, 16_384
SITUATIONS = ("long calls", "long programs")


@dataclass
class Program:
    """Starts at `at` with `threads` sessions side by side, each of `turns` calls of `out` tokens after `prompt`."""

    number: int
    kind: str
    at: float
    threads: int
    turns: int
    prompt: int
    out: int
    left: int = 0
    ended: float = 0.0

    @property
    def tokens(self) -> int:
        return self.threads * self.turns * self.out


@dataclass
class Clock:
    """The simulation's time, in seconds; the scheduler's modules read it as they would read the machine's."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Model:
    """Stands where the model runner does: gives every token the same logits, and lets time pass."""

    clock: Clock
    num_pages: int = PAGES
    max_batch_tokens: int = 256

    def forward(self, batch: Any) -> torch.Tensor:
        prompts = sum(each.count for each in batch.rows if each.count > 1)
        self.clock.now += FIXED_S + ROW_S * len(batch.rows) + TOKEN_S * prompts
        return torch.zeros(batch.num_logits, 1)

    def argmax_tokens(self, hidden: torch.Tensor) -> tuple[list[float], list[int]]:
        return [1.0] * len(hidden), [1] * len(hidden)

    def logits(self, hidden: torch.Tensor, allowed_ids: Any) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCAB)
        logits[:, 1] = 1.0
        return logits


@dataclass
class InMemoryTransport:
    """The programs: sends what is due, and the next call of a thread when its last has ended."""

    clock: Clock
    programs: list[Program]
    num_bad_frames: int = 0
    num_clients: int = 1
    num_left: int = 0
    due: list[tuple[float, int, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count, self.draw = itertools.count(1), random.Random(1)
        self.threads: dict[int, tuple[Program, int, int]] = {}  # call: its program, session, turns left behind it
        self.num_left = len(self.programs)
        for program in self.programs:
            program.left = program.threads
            for _ in range(program.threads):
                session = next(self.count)
                self._ask(program, session, program.turns - 1, program.at, [Open(session, program=program.number)])

    def _ask(self, program: Program, session: int, left: int, at: float, before: list[Any]) -> None:
        call = next(self.count)
        self.threads[call] = program, session, left
        tokens = [self.draw.randrange(2, VOCAB) for _ in range(program.prompt)]
        sampling = sampling_params(max_tokens=program.out, temperature=0, ignore_eos=True)
        heapq.heappush(self.due, (at, call, [*before, Append(session, tokens), Generate(session, call, sampling)]))

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, Any]]:
        if timeout_s != 0.0 and self.due:  # nothing runs: time goes on to the next arrival
            self.clock.now = max(self.clock.now, self.due[0][0])
        came: list[tuple[bytes, Any]] = []
        while self.due and self.due[0][0] <= self.clock.now:
            came += [(CLIENT, message) for message in heapq.heappop(self.due)[2]]
        return came

    def take_disconnected(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: Any) -> None:
        if isinstance(reply, Failed):
            raise RuntimeError(f"a call failed: {reply.text}")
        if not isinstance(reply, Finished):
            return
        program, session, left = self.threads.pop(reply.call)
        if left:
            self._ask(program, session, left - 1, self.clock.now, [])
            return
        heapq.heappush(self.due, (self.clock.now, next(self.count), [Close(session)]))
        program.left -= 1
        if not program.left:
            program.ended = self.clock.now
            self.num_left -= 1


def simulate(programs: list[Program], order: str, max_rows: int) -> float:
    """Runs all programs; notes when each ended, and returns when the last did."""
    clock = Clock()
    batching.time = request_metrics.time = SimpleNamespace(monotonic=clock.monotonic)  # type: ignore[assignment]
    vocabulary = Vocabulary(tuple(b"%d " % i for i in range(VOCAB)), (0,), lambda text: [])
    config = engine_config(order=order, max_batch_rows=max_rows, prompt_lookup=False)
    welcome = Welcome(PROTOCOL, "", VOCAB, CONTEXT, 0)
    transport, model, sampler = InMemoryTransport(clock, programs), Model(clock), Sampler()
    engine_loop = EngineLoop(config, welcome, model, sampler, vocabulary, CompilePool(vocabulary), transport)  # type: ignore[arg-type]
    while transport.num_left:
        engine_loop.step()
    return clock.now


def situation(name: str, num_shorts: int, max_rows: int) -> list[Program]:
    """As many long ones at the beginning as keep every row, then short programs of two calls, one after the other."""
    draw, numbers = random.Random(7), itertools.count(1)
    if name == "long calls":
        longs = [Program(next(numbers), "long", 0.0, 1, 1, 200, 8000) for _ in range(2 * max_rows)]
    else:
        longs = [Program(next(numbers), "long", 0.0, 8 * max_rows, 4, 100, 200) for _ in range(4)]
    work_s = sum(each.tokens for each in longs) / max_rows * (FIXED_S + ROW_S * max_rows)
    starts = sorted(draw.uniform(0.1, 0.7) * work_s for _ in range(num_shorts))
    return [*longs, *(Program(next(numbers), "short", at, 1, 2, 60, 40) for at in starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shorts", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    for name in SITUATIONS:
        means: dict[str, float] = {}
        for order in ("first-come", "fair"):
            programs = situation(name, options.shorts, options.rows)
            end = simulate(programs, order, options.rows)
            took = {
                kind: [each.ended - each.at for each in programs if each.kind == kind] for kind in ("short", "long")
            }
            means[order] = statistics.mean(took["short"])
            print(
                f"{name}, {order:10}: short programs {means[order]:7.1f} s (the worst {max(took['short']):7.1f}), "
                f"long ones {statistics.mean(took['long']):7.1f} s, "
                f"{sum(each.tokens for each in programs) / end:6.1f} tokens/s",
                flush=True,
            )
        print(f"{name}: short programs finish {means['first-come'] / means['fair']:.1f} times sooner", flush=True)


if __name__ == "__main__":
    main()
