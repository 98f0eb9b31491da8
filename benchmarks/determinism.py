"""`deterministic=True` put to the test: tokens and logprobs bit for bit, alone and in company, and what that costs.

A trial draws a prompt and a request, answers it alone with an empty cache, then again under other circumstances: beside
1 to 63 other requests, some of which share its beginning, on a cold or a warm cache, in chunks of other sizes, or with
so few pages that rows are retracted. Nothing is run twice to make it pass: every difference is counted and printed
with the number of its trial.

    python benchmarks/determinism.py [--weights bf16,as-stored] [--trials 1000] [--minutes 5] [--first 0]
                                     [--json FILE] [--loose] [--cost]

With `--json` the counts of all runs with the same file, which a run that was killed or whose minutes were over goes on
with: trials in it are not done again, and their numbers are the seeds of what failed. A trial that breaks (no answer in
time, say) counts as one that differs, and ends the run. Knows: the engine. Must not know: kernels.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trial_record import Record, code_stamp

import plait.kernels
import plait.runtime
from plait.runtime.client.call import Call
from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import SamplingParams, sampling_params

ENGINES: dict[str, dict[str, int]] = {  # the first one gives the answers that the others are held against
    "whole": {"max_pages": 24_000},
    "chunks of 23": {"max_pages": 24_000, "max_batch_tokens": 23},
    "few pages": {"max_pages": 150, "max_batch_tokens": 96},
}
WORDS = 49_000  # token ids below this are ordinary text
PATIENCE_S = 120.0
COST_ROWS, COST_TOKENS, COST_ROUNDS = (1, 16), 48, 4


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: list[int]
    sampling: SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--weights", default="bf16,as-stored")
    parser.add_argument("--trials", type=int, default=1000, help="of each form")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each form; trials end when they are over")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="what all trials gave; an existing one is gone on with"
    )
    parser.add_argument("--loose", action="store_true", help="without deterministic: does this script see anything?")
    parser.add_argument("--cost", action="store_true", help="only the cost in throughput")
    options = parser.parse_args()
    forms = options.weights.split(",")
    if options.cost:
        for form in forms:
            cost(form)
        return 0
    sources = [Path(each.__path__[0]) for each in (plait.kernels, plait.runtime)]
    try:
        record = Record(options.json, code_stamp(sources, Path(__file__).read_text(), options.loose))
    except ValueError as error:
        parser.error(str(error))
    for form in forms:
        trials(record, form, not options.loose, options.first, options.trials, options.minutes)
    return int(any(record.part(form)["failing"] for form in forms))


# -- trials -------------------------------------------------------------------------------------------


def trials(record: Record, form: str, deterministic: bool, first: int, count: int, minutes: float) -> None:
    """Does those of trials [first, first + count) that are not in the record, and prints what it has then."""
    begun = time.monotonic()
    if next(record.left(form, first, count), None) is not None:
        engines = {
            name: Engine(weights=form, deterministic=deterministic, **settings)  # type: ignore[arg-type]
            for name, settings in ENGINES.items()
        }
        try:
            for number in record.left(form, first, count):
                if time.monotonic() - begun > 60 * minutes:
                    break
                recorded(record, form, engines, number)
        finally:
            for engine in engines.values():
                engine.shutdown()
    print(f"{form}: {record.summary(form)}", flush=True)


def recorded(record: Record, form: str, engines: dict[str, Engine], number: int) -> None:
    """One trial, counted; one that breaks, too."""
    begun, status = time.monotonic(), engines["few pages"].client.status
    before = status().retractions
    try:
        kind, difference = trial(engines, random.Random(number))
    except Exception as error:
        record.add(form, number, "broken", f"{type(error).__name__}: {error}", time.monotonic() - begun, 0)
        raise
    record.add(form, number, kind, difference, time.monotonic() - begun, status().retractions - before)
    if difference:
        print(f"{form}: trial {number} ({kind}) differs: {difference}", flush=True)


def trial(engines: dict[str, Engine], draw: random.Random) -> tuple[str, str]:
    """(what the second answer came beside, how it differs; "" if not in a bit)."""
    asked = request(draw, [], draw.choice((4, 20)))
    whole = engines["whole"]
    whole.client.flush_cache()
    alone = outcome(start(whole, asked))
    name = draw.choice(list(engines))
    engine = engines[name]
    warm = draw.random() < 0.5
    if not warm:
        engine.client.flush_cache()
    elif name != "whole":
        part = asked.prompt[: draw.randint(1, len(asked.prompt))]
        start(engine, Asked(part, sampling_params(max_tokens=1, temperature=0))).result(PATIENCE_S)
    size = min(64, round(2 ** draw.uniform(1, 6.2)))
    lengths = (24,) if name == "few pages" else (1, 4, 16)  # longer than the pages that each row is kept
    others = [request(draw, asked.prompt, draw.choice(lengths)) for _ in range(size - 1)]
    batch = [*others, asked]
    draw.shuffle(batch)
    calls = [start(engine, each) for each in batch]
    company = outcome(calls[next(i for i, each in enumerate(batch) if each is asked)])
    for call in calls:
        call.result(PATIENCE_S)
    kind = f"{name}, {'warm' if warm else 'cold'}"
    if len(alone) != len(company):
        return kind, f"{len(alone)} tokens alone, {len(company)} in company of {size}"
    pairs = zip(alone, company, strict=True)
    return kind, next((f"{a!r} alone, {b!r} in company of {size}" for a, b in pairs if a != b), "")


def request(draw: random.Random, shared: list[int], tokens: int) -> Asked:
    """A random prompt, which may begin as `shared` does, and random sampling that is seeded."""
    begin = shared[: draw.randint(1, len(shared))] if shared and draw.random() < 0.4 else []
    prompt = begin + [draw.randrange(100, WORDS) for _ in range(draw.choice((1, 4, 12, 40)))]
    sampling = sampling_params(
        max_tokens=tokens,
        temperature=draw.choice((0.0, 0.8, 1.5)),
        top_k=draw.choice((-1, 40)),
        seed=draw.randrange(1 << 31),
        logprobs=True,
        top_logprobs=3,
        ignore_eos=True,
    )
    return Asked(prompt, sampling)


def start(engine: Engine, asked: Asked) -> Call:
    session = engine.client.open_session()
    session.append_tokens(asked.prompt)
    call = session.generate(asked.sampling)
    session.close()
    return call


def outcome(call: Call) -> list[Any]:
    """Per token: its id, its logprob to the last bit, and those of the likeliest three."""
    result = call.result(PATIENCE_S)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    return [(each.token_id, each.logprob.hex(), [(t, p.hex()) for t, p in each.top]) for each in result.logprobs]


# -- cost ---------------------------------------------------------------------------------------------


def cost(form: str) -> None:
    """Tokens a second with and without, in turns; the best round of each."""
    with Engine(weights=form) as plain, Engine(weights=form, deterministic=True) as fixed:  # type: ignore[arg-type]
        for rows in COST_ROWS:
            rounds = [[rate(engine, rows) for engine in (plain, fixed)] for _ in range(COST_ROUNDS)]
            best = [max(each) for each in zip(*rounds, strict=True)]
            print(
                f"{form}, {rows:2} rows: {best[0]:.0f} tokens/s, deterministic {best[1]:.0f} "
                f"({best[1] / best[0] - 1:+.1%})",
                flush=True,
            )


def rate(engine: Engine, rows: int) -> float:
    sampling = sampling_params(max_tokens=COST_TOKENS, temperature=0, ignore_eos=True)
    asked = [Asked([300 + row, *range(1000, 1030)], sampling) for row in range(rows)]
    for call in [start(engine, Asked(each.prompt, sampling_params(max_tokens=1))) for each in asked]:
        call.result(PATIENCE_S)  # the prompts are cached: only decoding counts
    begun = time.perf_counter()
    for call in [start(engine, each) for each in asked]:
        call.result(PATIENCE_S)
    return rows * COST_TOKENS / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
