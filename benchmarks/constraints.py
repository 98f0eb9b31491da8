"""What constraints cost and whether they hold: schemas, masks; and JSON beside free text on an engine.

python benchmarks/constraints.py [--schemas FILE.jsonl] [--limit N] [--library | --engine] [--streams 1,16] [--rounds 3]

Without a file the schemas are those of the tests: the table in five surroundings, and the refused ones; a file holds
one schema a line. Compiling is timed by the clock of the child that does it. The vocabulary is the embedded model's,
49,152 tokens. The engine's tokens count as the text has them, forced ones included.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common.options import parsed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "constrained"))
from compile_pools import results_of
from schema_cases import REFUSED, ROWS, variants
from schema_strategies import reference_validator

from plait.constrained import CompilePool, Grammar, GrammarError, JsonSchema, Vocabulary, mask_words
from plait.constrained.json_schema.rewrite.document import subschemas
from plait.constrained.json_schema.rewrite.keywords import ASSERTIONS
from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params
from plait.runtime.tokenizer.tokenizer import load_tokenizer

STEPS = 40  # of a random text
FIELDS: dict[str, Any] = {
    "full_name": {"type": "string", "maxLength": 24},
    "date_of_birth": {"type": "string", "format": "date"},
    "email_address": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,10}\\.(com|org|net)$"},
    "occupation": {"enum": ["engineer", "teacher", "doctor", "farmer", "artist"]},
    "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 60},
    "is_available": {"type": "boolean"},
    "preferred_language": {"enum": ["English", "Spanish", "Mandarin", "Hindi", "Arabic"]},
    "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
}
RECORD = JsonSchema({"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False})


def main() -> None:
    more = {"library": False, "engine": False}
    options = parsed(__doc__, schemas=None, limit=2000, streams="1,16", rounds=3, **more)
    if not options.engine:
        library(options.schemas, options.limit)
    if not options.library:
        with Runtime() as runtime:
            for streams in map(int, options.streams.split(",")):
                decoding(runtime.client, streams, options.rounds)


def library(path: str | None, limit: int) -> None:
    if path is not None:
        listed = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    else:
        listed = [schema for row in ROWS for _, (schema, _, _) in variants(row)] + [schema for schema, _, _ in REFUSED]
    vocabulary = load_tokenizer(locate_model(None)).vocabulary
    pool = CompilePool(vocabulary, cache_bytes=1 << 32)
    pool.start()
    try:
        compiled(pool, {"type": "null"})
        taken = schemas(listed[:limit], pool)
    finally:
        pool.close()
    walking(taken, vocabulary)


def compiled(pool: CompilePool, schema: Any, **options: bool) -> Grammar | GrammarError:
    ticket = pool.submit(JsonSchema(schema, **options))
    return results_of(pool, [ticket])[ticket]


def schemas(listed: list[Any], pool: CompilePool) -> list[tuple[Any, Grammar]]:
    """Compile each; count what is taken, and print the times in the child."""
    pool.compile_s.clear()
    answers = [(schema, compiled(pool, schema)) for schema in listed]
    taken = [(schema, grammar) for schema, grammar in answers if isinstance(grammar, Grammar)]
    met = {name for schema, _ in taken for _, part in subschemas(schema, "") for name in part} & ASSERTIONS
    print(
        f"schemas: {len(listed)}, taken {len(taken)} ({len(taken) / len(listed):.1%}), the rest refused with a reason"
    )
    print(f"keywords in those taken: {len(met)} of {len(ASSERTIONS)}, missing: {sorted(ASSERTIONS - met)}")
    show("compile, processor time of the child", [1e3 * spent for spent in pool.compile_s], "ms")
    return taken


def walking(taken: list[tuple[Any, Grammar]], vocabulary: Vocabulary) -> None:
    """Random texts under the masks: what each question costs, and whether what is completed is valid."""
    rng, row = random.Random(1), np.zeros(mask_words(len(vocabulary)), np.int32)
    costs: dict[str, list[float]] = {"mask fill": [], "accept": [], "rollback of 1": [], "completion": []}
    false = checked = 0

    def timed(name: str, call: Any, *given: Any) -> Any:
        begun = time.perf_counter_ns()
        answer = call(*given)
        costs[name].append((time.perf_counter_ns() - begun) / 1e3)
        return answer

    for schema, grammar in rng.sample(taken, min(400, len(taken))):
        matcher, text, judge = grammar.matcher(), b"", reference_validator(schema)
        for _ in range(STEPS):
            timed("mask fill", matcher.fill_mask, row)
            way = timed("completion", matcher.completion, 200)
            token = int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))))
            timed("accept", matcher.accept, token)
            timed("rollback of 1", matcher.rollback, 1)
            if way is not None:
                value = json.loads(text + b"".join(vocabulary.token_bytes[t] for t in way))
                checked += 1
                false += "inf" not in repr(value).lower() and not judge.is_valid(value)  # 1e999 is JSON, and no float
            matcher.accept(token)
            text += vocabulary.token_bytes[token]
            if matcher.is_terminated:
                break
    for name, times in costs.items():
        show(name, times, "us")
    print(f"texts completed and judged by jsonschema-rs: {checked}, false accepts {false}")


def show(name: str, times: list[float], unit: str) -> None:
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{name:42} p50 {p50:9.2f} {unit}   p99 {p99:9.2f} {unit}   of {len(times)}")


def decoding(client: Client, streams: int, rounds: int) -> None:
    """JSON and free texts of the same lengths, in turn: the medians of both and their ratio."""
    seen, forced = itertools.count(), list[float]()
    speeds: dict[str, list[float]] = {"json": [], "free": []}

    def start(max_tokens: int, constraint: Any, ignore_eos: bool) -> Call:
        session = client.open_session()
        session.append(f"Here is the record of person number {next(seen)}, as JSON:\n")
        params = sampling_params(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        call = session.generate(params, constraint)
        session.close()
        return call

    for round_number in range(rounds + 1):  # the first warms up
        lengths = [400] * streams
        for side, constraint in (("json", RECORD), ("free", None)):
            begun = time.perf_counter()
            calls = [start(length, constraint, constraint is None) for length in lengths]
            results = [call.result() for call in calls]
            lengths = [len(result.token_ids) for result in results]
            if round_number:
                speeds[side].append(sum(lengths) / (time.perf_counter() - begun))
            if constraint is not None:
                forced += [result.usage.forced_tokens / len(result.token_ids) for result in results]
                assert all(json.loads(result.text) for result in results)
    free, constrained = (statistics.median(speeds[side]) for side in ("free", "json"))
    print(
        f"{streams:3} streams, a record of 8 fields: JSON {constrained:6.1f} tok/s, free {free:6.1f} tok/s, "
        f"ratio {constrained / free:.2f}; {statistics.mean(forced):.0%} of the tokens forced"
    )


if __name__ == "__main__":
    main()
