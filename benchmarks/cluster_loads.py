"""The loads of `cluster.py`: chats over shared contexts, agents in trees, and questions over documents.

A job is a prompt and the jobs that begin when it has ended; their prompts continue its prompt and its output.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from simulated_engine import VOCAB

from plait.runtime.arrays import IntArray


@dataclass(slots=True)
class Job:
    """One request. `start_s`: when it arrives; for a later job, how long after its parent's end."""

    start_s: float
    prompt: IntArray  # of a later job, the tokens behind the parent's text
    num_output: int
    after: list[Job] = field(default_factory=list)

    def tree(self) -> Iterator[Job]:
        """This job and all that come after it."""
        yield self
        for job in self.after:
            yield from job.tree()


def _tokens(draw: np.random.Generator, count: int) -> IntArray:
    return draw.integers(2, VOCAB, count, dtype=np.int32)


def chats(duration_s: float, rate: float, seed: int) -> list[Job]:
    """150 contexts of 6,000 tokens; each request is a question of 1,200 tokens over one, as in llm-d's benchmark."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    contexts = [_tokens(numbers, 6000) for _ in range(150)]
    return [
        Job(at, np.concatenate([draw.choice(contexts), _tokens(numbers, 1200)]), 128)
        for at in _arrivals(draw, duration_s, rate)
    ]


def agents(duration_s: float, rate: float, seed: int) -> list[Job]:
    """A shared instruction of 2,000 tokens, a task of 3,000, then three levels of two branches of 300 tokens each."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    instruction = _tokens(numbers, 2000)

    def branches(level: int) -> list[Job]:
        return [Job(0.05, _tokens(numbers, 300), 64, branches(level - 1)) for _ in range(2)] if level else []

    num_jobs = 1 + 2 + 4 + 8
    return [
        Job(at, np.concatenate([instruction, _tokens(numbers, 3000)]), 64, branches(3))
        for at in _arrivals(draw, duration_s, rate / num_jobs)
    ]


def documents(duration_s: float, rate: float, seed: int) -> list[Job]:
    """10,000 documents of 3,000 tokens, chosen with Zipf's law (exponent 1.1); a question of 100 tokens on one."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    weights = [1 / rank**1.1 for rank in range(1, 10_001)]

    def document(number: int) -> IntArray:
        return _tokens(np.random.default_rng([seed, number]), 3000)

    arrivals = list(_arrivals(draw, duration_s, rate))
    chosen = draw.choices(range(10_000), weights, k=len(arrivals))
    return [
        Job(at, np.concatenate([document(number), _tokens(numbers, 100)]), 64)
        for at, number in zip(arrivals, chosen, strict=True)
    ]


def _arrivals(draw: random.Random, duration_s: float, rate: float) -> Iterator[float]:
    at = draw.expovariate(rate)
    while at < duration_s:
        yield at
        at += draw.expovariate(rate)


LOADS: dict[str, tuple[Callable[[float, float, int], list[Job]], float]] = {  # with requests/s for each replica
    "chats": (chats, 10.0),
    "agents": (agents, 24.0),
    "documents": (documents, 20.0),
}
