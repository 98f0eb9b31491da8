"""Tests `deterministic=True`: compares tokens and logprobs bit by bit, alone and in batches, and measures the cost.

A trial draws a random request, runs it alone with an empty cache, then again under other conditions: beside 1 to 63
other requests, some with a common prefix, with a cold or a warm cache, in chunks of another size, or with so few pages
that requests are retracted. No trial is repeated until it passes: every difference is counted and printed with the
trial's number, which is its seed.

    python benchmarks/determinism.py [--weights bf16,as-stored] [--trials 1000] [--minutes 5] [--first 0]
                                     [--loose] [--cost]

A run that ran out of minutes is continued with `--first`. A trial that raises (for example by a timeout) ends the run.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, NamedTuple

from common.options import parsed

from plait.runtime.client.call import Call
from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import SamplingParams, sampling_params

ENGINES: dict[str, dict[str, int]] = {  # the first one gives the reference outputs
    "whole": {"max_pages": 24_000},
    "chunks of 23": {"max_pages": 24_000, "max_batch_tokens": 23},
    "few pages": {"max_pages": 150, "max_batch_tokens": 96},
}
WORDS = 49_000  # token ids below this are ordinary text
TIMEOUT_S = 120.0
COST_ROWS, COST_TOKENS, COST_ROUNDS = (1, 16), 48, 4


class TrialRequest(NamedTuple):
    """A prompt and its sampling parameters."""

    prompt: list[int]
    sampling: SamplingParams


def main() -> int:
    options = parsed(__doc__, weights="bf16,as-stored", trials=1000, minutes=60.0, first=0, loose=False, cost=False)
    forms = options.weights.split(",")
    if options.cost:
        for form in forms:
            cost(form)
        return 0
    trials = range(options.first, options.first + options.trials)
    differ = [run_trials(form, not options.loose, trials, options.minutes) for form in forms]
    return int(any(differ))


def run_trials(form: str, deterministic: bool, trials: range, minutes: float) -> bool:
    """Runs trials and prints each that differs, and a summary. Returns whether any does."""
    start_s, kinds, differing = time.monotonic(), Counter[str](), list[int]()
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(weights=form, deterministic=deterministic, **settings))  # type: ignore[arg-type]
            for name, settings in ENGINES.items()
        }
        for number in trials:
            if time.monotonic() - start_s > 60 * minutes:
                break
            kind, difference = run_trial(engines, random.Random(number))
            kinds[kind] += 1
            if difference:
                differing.append(number)
                print(f"{form}: trial {number} ({kind}) differs: {difference}", flush=True)
        retractions = engines["few pages"].client.status().retractions
    of_kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    text = f"{len(differing)} of {kinds.total()} trials differ {differing or ''}"
    print(f"{form}: {text} ({time.monotonic() - start_s:.0f} s; {of_kinds}; {retractions} retractions)", flush=True)
    return bool(differing)


def run_trial(engines: dict[str, Engine], draw: random.Random) -> tuple[str, str]:
    """Returns (conditions of the second run, first difference or "")."""
    target = random_request(draw, [], draw.choice((4, 20)))
    whole = engines["whole"]
    whole.client.flush_cache()
    alone = outcome(start(whole, target))
    name = draw.choice(list(engines))
    engine = engines[name]
    warm = draw.random() < 0.5
    if not warm:
        engine.client.flush_cache()
    elif name != "whole":
        part = target.prompt[: draw.randint(1, len(target.prompt))]
        start(engine, TrialRequest(part, sampling_params(max_tokens=1, temperature=0))).result(TIMEOUT_S)
    size = min(64, round(2 ** draw.uniform(1, 6.2)))
    lengths = (24,) if name == "few pages" else (1, 4, 16)  # longer than the pages reserved for each request
    others = [random_request(draw, target.prompt, draw.choice(lengths)) for _ in range(size - 1)]
    place = draw.randint(0, len(others))
    calls = [start(engine, request) for request in [*others[:place], target, *others[place:]]]
    in_batch = outcome(calls[place])
    for call in calls:
        call.result(TIMEOUT_S)
    kind = f"{name}, {'warm' if warm else 'cold'}"
    pairs = zip_longest(alone, in_batch)
    return kind, next((f"{a!r} alone, {b!r} in a batch of {size}" for a, b in pairs if a != b), "")


def random_request(draw: random.Random, shared: list[int], tokens: int) -> TrialRequest:
    """A random prompt, which may begin with a part of `shared`, and random seeded sampling parameters."""
    prefix = shared[: draw.randint(1, len(shared))] if shared and draw.random() < 0.4 else []
    prompt = prefix + [draw.randrange(100, WORDS) for _ in range(draw.choice((1, 4, 12, 40)))]
    sampling = sampling_params(
        max_tokens=tokens,
        temperature=draw.choice((0.0, 0.8, 1.5)),
        top_k=draw.choice((-1, 40)),
        seed=draw.randrange(1 << 31),
        logprobs=True,
        top_logprobs=3,
        ignore_eos=True,
    )
    return TrialRequest(prompt, sampling)


def start(engine: Engine, request: TrialRequest) -> Call:
    session = engine.client.open_session()
    session.append_tokens(request.prompt)
    call = session.generate(request.sampling)
    session.close()
    return call


def outcome(call: Call) -> list[Any]:
    """For each token: its id, its exact logprob, and those of the three most likely tokens."""
    result = call.result(TIMEOUT_S)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    return [(entry.token_id, entry.logprob.hex(), [(t, p.hex()) for t, p in entry.top]) for entry in result.logprobs]


def cost(form: str) -> None:
    """Prints tokens per second with and without `deterministic`, the best of alternating rounds."""
    with Engine(weights=form) as plain, Engine(weights=form, deterministic=True) as fixed:  # type: ignore[arg-type]
        for rows in COST_ROWS:
            rounds = [[tokens_per_second(engine, rows) for engine in (plain, fixed)] for _ in range(COST_ROUNDS)]
            free, same = (max(rates) for rates in zip(*rounds, strict=True))
            rates = f"{free:.0f} tokens/s, deterministic {same:.0f} ({same / free - 1:+.1%})"
            print(f"{form}, {rows:2} rows: {rates}", flush=True)


def tokens_per_second(engine: Engine, rows: int) -> float:
    texts = [[300 + row, *range(1000, 1030)] for row in range(rows)]
    for max_tokens in (1, COST_TOKENS):  # the first caches the prompts, so that only decoding is measured
        sampling, start_s = sampling_params(max_tokens=max_tokens, temperature=0, ignore_eos=True), time.perf_counter()
        for call in [start(engine, TrialRequest(text, sampling)) for text in texts]:
            call.result(TIMEOUT_S)
    return rows * COST_TOKENS / (time.perf_counter() - start_s)


if __name__ == "__main__":
    sys.exit(main())
