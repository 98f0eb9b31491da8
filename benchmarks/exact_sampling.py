"""Constrained values under a mask and with `exact=True`, against the model's own distribution of the valid texts.

For each task the probabilities of all valid texts are scored, and SAMPLES values are drawn both ways. Printed are the
total variation distance of what was drawn from what was scored, the time of a sample, and the steps of the model.

    python benchmarks/exact_sampling.py [--samples 200]
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from dataclasses import dataclass

from plait.constrained import Regex
from plait.lang.choices import choice_probabilities
from plait.runtime.client.client import Client
from plait.runtime.process.engine import Engine
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


def draw(client: Client, task: Task, count: int, exact: bool, salted: bool) -> tuple[list[str], float, float]:
    """(values, seconds of one, steps of the model for one token). `salted`: nothing is shared between the samples."""
    constraint = Regex("|".join(map(re.escape, task.texts)))
    values, steps, num_tokens, spent_s = [], 0, 0, 0.0
    for seed in range(count):
        prompt = f"Number {seed}.\n{task.prompt}" if salted else task.prompt
        session = client.open_session()
        session.append(prompt)
        session.generate(sampling_params(max_tokens=0)).result()  # the prompt is computed and not timed
        start_s = time.perf_counter()
        result = session.generate(sampling_params(max_tokens=64, seed=seed, exact=exact), constraint).result()
        spent_s += time.perf_counter() - start_s
        session.close()
        values.append(result.text)
        num_tokens += len(result.token_ids)
        steps += len(result.token_ids) if result.exact is None else result.exact.model_steps
    return values, spent_s / count, steps / num_tokens


def distance(values: list[str], probabilities: dict[str, float]) -> float:
    """Total variation."""
    counts = Counter(values)
    return sum(abs(counts[text] / len(values) - probability) for text, probability in probabilities.items()) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    samples = parser.parse_args().samples
    with Engine() as engine:
        for task in TASKS:
            probabilities, mass = expected(engine.client, task)
            print(f"{task.name}: one of the texts is written with probability {mass:.2g}")
            draw(engine.client, task, 2, False, False)  # compiles the grammar
            masked = draw(engine.client, task, samples, False, False)
            exact = draw(engine.client, task, samples, True, False)
            unshared = draw(engine.client, task, max(8, samples // 10), True, True)
            unshared_masked = draw(engine.client, task, max(8, samples // 10), False, True)
            for name, (values, _, _) in (("mask", masked), ("exact", exact)):
                print(f"  {name}: distance {distance(values, probabilities):.3f} after {samples} samples")
            print(f"  exact, samples of one prompt: {exact[1] / masked[1]:.2f} x the time of masking "
                  f"({masked[1] * 1e3:.1f} ms), {exact[2]:.2f} model steps for a token")  # fmt: skip
            print(f"  exact, every prompt new: {unshared[1] / unshared_masked[1]:.2f} x the time of masking, "
                  f"{unshared[2]:.2f} model steps for a token")  # fmt: skip


if __name__ == "__main__":
    main()
