"""Constrained values under a mask, with `exact=True` and with `particles`, against the model's own distribution.

For each task the probabilities of all valid texts are scored, and SAMPLES values are drawn in each way. Printed are the
total variation distance of what was drawn from what was scored, the time of a sample relative to masking, the prefixes
that the model computed, and for particles the mean weight and what the constraint checked.

    python benchmarks/exact_sampling.py [--samples 200] [--particles 1 4 8 16 32]
    python benchmarks/exact_sampling.py --beside
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained import Regex
from plait.runtime.client.client import Client
from plait.runtime.process.engine import Engine
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling.choice_scores import choice_probabilities
from plait.runtime.sampling_params import sampling_params


@dataclass(frozen=True)
class Task:
    """A prompt and all texts that are valid after it, none of which begins another one."""

    name: str
    prompt: str
    texts: tuple[str, ...]


def _json(animal: str, sound: str) -> str:
    return f'{{"animal": "{animal}", "sound": "{sound}"}}'


TASKS = (
    Task(
        "labels of one length",
        "Review: The food was cold and the waiter was rude.\nSentiment (positive, negative or neutral):",
        (" positive", " negative", " neutral"),
    ),
    Task(
        "long and short labels",
        "Question: Is Paris the capital of France?\nPossible answers: yes; no; not enough information; "
        "nothing in the text says so.\nAnswer:",
        (" yes", " no.", " not enough information", " nothing in the text says so"),
    ),
    Task(
        "JSON, an early choice decides the rest",
        'An animal and its sound, as JSON.\n{"animal": "cow", "sound": "moo"}\n{"animal": "sheep", "sound": "baa"}\n',
        tuple(
            _json(*pair)
            for pair in (
                ("dog", "woof"), ("dog", "bark"), ("cat", "meow"), ("cat", "purr"), ("horse", "neigh"),
                ("pig", "squeal"), ("chicken", "cock-a-doodle-doo"), ("bird", "sings in the early morning"),
            )
        ),
    ),
    Task(
        "a time of day, 96 of them",
        "Departures. London 08:15, Paris 09:40, Rome 10:05, Vienna 11:30. The train to Berlin leaves at",
        tuple(f" {hour:02}:{minute:02}" for hour in range(24) for minute in range(0, 60, 15)),
    ),
)  # fmt: skip


def expected(client: Client, task: Task) -> tuple[dict[str, float], float]:
    """The probability of each text given that one of them is written, and the probability that one is."""
    session = client.open_session()
    session.append(task.prompt)
    choice = session.select(task.texts).result().choice
    session.close()
    assert choice is not None
    mass = sum(math.exp(math.fsum(logprobs)) for logprobs in choice.token_logprobs)
    return dict(zip(task.texts, choice_probabilities(choice.token_logprobs), strict=True)), mass


_SALTS = itertools.count()


@dataclass(frozen=True)
class Draws:
    """What was drawn. `step_tokens`: prefixes that the model computed for one token. `weights`: of `particles`."""

    values: list[str]
    seconds: float  # of one sample
    step_tokens: float
    checks_per_token: float
    masks_per_token: float
    weights: list[float]


def draw(client: Client, task: Task, count: int, salted: bool = False, **how: Any) -> Draws:
    """Draws `count` values; `how` has exact, particles or neither. `salted`: nothing is shared between the samples."""
    constraint = Regex("|".join(map(re.escape, task.texts)))
    values, weights, steps, checks, masks, num_tokens, spent_s = [], [], 0, 0, 0, 0, 0.0
    for seed in range(count):
        prompt = f"Number {next(_SALTS)}.\n{task.prompt}" if salted else task.prompt
        session = client.open_session()
        session.append(prompt)
        session.generate(sampling_params(max_tokens=0)).result()  # the prompt is computed and not timed
        start_s = time.perf_counter()
        result = session.generate(sampling_params(max_tokens=64, seed=seed, **how), constraint).result()
        spent_s += time.perf_counter() - start_s
        session.close()
        values.append(result.text)
        num_tokens += len(result.token_ids)
        info = result.exact or result.particles
        steps += len(result.token_ids) if info is None else info.model_steps
        if result.particles is not None:
            checks, masks = checks + result.particles.constraint_checks, masks + result.particles.masks
            weights.append(math.exp(result.particles.log_weight))
    return Draws(values, spent_s / count, steps / num_tokens, checks / max(1, steps), masks / max(1, steps), weights)


def distance(values: list[str], probabilities: dict[str, float]) -> float:
    """Total variation."""
    counts = Counter(values)
    return sum(abs(counts[text] / len(values) - probability) for text, probability in probabilities.items()) / 2


def measure(client: Client, task: Task, samples: int, counts: Sequence[int]) -> None:
    probabilities, mass = expected(client, task)
    print(f"{task.name}: one of the texts is written with probability {mass:.2g}")
    draw(client, task, 2)  # compiles the grammar
    draw(client, task, 2, particles=2)
    masked = draw(client, task, samples)
    print(f"  mask: distance {distance(masked.values, probabilities):.3f}, {masked.seconds * 1e3:.1f} ms for a sample")
    ways: list[tuple[str, dict[str, Any]]] = [("exact", {"exact": True})]
    ways += [(f"particles={count}", {"particles": count}) for count in counts]
    for name, how in ways:
        shared = draw(client, task, samples, **how)
        pairs = [(draw(client, task, 2, True), draw(client, task, 2, True, **how)) for _ in range(samples // 8)]
        ratio = sum(new.seconds for _, new in pairs) / sum(beside.seconds for beside, _ in pairs)
        num_prefixes = statistics.fmean(new.step_tokens for _, new in pairs)
        line = (
            f"  {name}: distance {distance(shared.values, probabilities):.3f}; time of masking x "
            f"{shared.seconds / masked.seconds:.2f} for one prompt, "
            f"x {ratio:.2f} where every prompt is new ({num_prefixes:.2f} prefixes for a token)"
        )
        if shared.weights:
            mean, spread = statistics.fmean(shared.weights), statistics.pstdev(shared.weights)
            line += (
                f"; mean weight {mean / mass:.3f} +- {spread / mass / math.sqrt(samples):.3f} of that probability; "
                f"{shared.checks_per_token:.2f} checks and {shared.masks_per_token:.2f} masks for a prefix"
            )
        print(line, flush=True)


def measure_neighbours(seconds: float = 6.0) -> None:
    """Prints the time per token of four free streams beside a loop of the JSON task."""
    task = TASKS[2]
    ways: list[tuple[str, dict[str, Any] | None]] = [("alone", None), ("mask", {}), ("exact", {"exact": True})]
    ways += [(f"particles={count}", {"particles": count}) for count in (8, 64)]
    with Runtime(progress=False) as runtime:
        for name, how in ways:
            gaps: list[float] = []
            end_s = time.perf_counter() + seconds
            streams = [threading.Thread(target=_stream, args=(runtime.client, end_s, gaps)) for _ in range(4)]
            for stream in streams:
                stream.start()
            num_samples = 0
            while how is not None and time.perf_counter() < end_s:
                draw(runtime.client, task, 1, True, **how)
                num_samples += 1
            for stream in streams:
                stream.join()
            cuts = statistics.quantiles(gaps, n=100)
            print(
                f"four streams beside {name}: {cuts[49] * 1e3:.1f} ms for a token, p99 {cuts[98] * 1e3:.1f}; "
                f"{num_samples / seconds:.1f} samples/s",
                flush=True,
            )


def _stream(client: Client, end_s: float, gaps: list[float]) -> None:
    while time.perf_counter() < end_s:
        session = client.open_session()
        session.append("Once upon a time")
        call = session.generate(sampling_params(max_tokens=100, ignore_eos=True, temperature=1.0))
        call.result()
        session.close()
        gaps += [gap_s for gap_s, _ in call.inter_token_gaps()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--particles", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument("--beside", action="store_true", help="measure what other calls pay instead")
    arguments = parser.parse_args()
    if arguments.beside:
        measure_neighbours()
        return
    with Engine() as engine:
        for task in TASKS:
            measure(engine.client, task, arguments.samples, arguments.particles)


if __name__ == "__main__":
    main()
