"""What constraints cost and whether they hold: schemas, masks; and JSON beside free text on an engine.

python benchmarks/constraints.py [--schemas FILE.jsonl] [--limit N] [--library | --engine] [--streams 1,16] [--rounds 3]

Without a file the schemas are those of the tests: the table in five surroundings, the refused ones, and those shaped as
people write them; a file holds one schema a line. Compiling is timed by the clock of the child that does it. The
vocabulary is the embedded model's, 49,152 tokens. `--engine` runs the engine's part alone, `--library` the other. The
engine's tokens count as the text has them, forced ones included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "constrained"))
from compile_pools import results_of
from pydantic_models import PYDANTIC
from real_schemas import REAL
from schema_cases import REFUSED, ROWS, variants
from schema_strategies import reference_validator

from plait.constrained import CompilePool, Grammar, GrammarError, JsonSchema, Vocabulary, mask_words
from plait.constrained.json_schema.rewrite.document import subschemas
from plait.constrained.json_schema.rewrite.keywords import ASSERTIONS
from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.numpy_ops import NumpyLogitOperations
from plait.runtime.sampling_params import sampling_params
from plait.runtime.tokenizer.tokenizer import load_tokenizer

STEPS, BATCH = 40, 16
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schemas", type=Path, help="a file with one JSON Schema a line")
    parser.add_argument("--limit", type=int, default=2000, help="how many schemas at most")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--library", action="store_true", help="only what needs no model")
    part.add_argument("--engine", action="store_true", help="only the engine under constraints")
    parser.add_argument("--streams", default="1,16", help="how many texts at once, several numbers with commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of JSON and of free text, in turn")
    arguments = parser.parse_args()
    if not arguments.engine:
        library(arguments.schemas, arguments.limit)
    if not arguments.library:
        with Runtime() as runtime:
            for streams in map(int, arguments.streams.split(",")):
                decoding(runtime.client, streams, arguments.rounds)


def library(path: Path | None, limit: int) -> None:
    vocabulary = load_tokenizer(locate_model(None)).vocabulary
    pool = CompilePool(vocabulary, cache_bytes=1 << 32)
    pool.start()
    try:
        compiled(pool, {"type": "null"})
        taken = schemas(read(path)[:limit], pool)
        if path is None:
            real(pool)
    finally:
        pool.close()
    walking(taken, vocabulary)
    applying(len(vocabulary))


def compiled(pool: CompilePool, schema: Any, **options: bool) -> Grammar | GrammarError:
    ticket = pool.submit(JsonSchema(schema, **options))
    return results_of(pool, [ticket])[ticket]


def read(path: Path | None) -> list[Any]:
    """The schemas of `path`, or of the tests."""
    if path is not None:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [schema for row in ROWS for _, (schema, _, _) in variants(row)] + [schema for schema, _, _ in REFUSED]


def schemas(listed: list[Any], pool: CompilePool) -> list[tuple[Any, Grammar]]:
    """Compile each; count what is taken, and print the times in the child."""
    pool.compile_s.clear()
    answers = [(schema, compiled(pool, schema)) for schema in listed]
    taken = [(schema, grammar) for schema, grammar in answers if isinstance(grammar, Grammar)]
    met = {name for schema, _ in taken for _, part in subschemas(schema, "") for name in part} & ASSERTIONS
    share = f"{len(taken) / len(listed):.1%}"
    print(f"schemas: {len(listed)}, taken {len(taken)} ({share}), the rest refused with a reason")
    missing = ", ".join(sorted(ASSERTIONS - met)) or "none"
    print(f"keywords in those taken: {len(met)} of {len(ASSERTIONS)}, missing: {missing}")
    show("compile, processor time of the child", [1e3 * spent for spent in pool.compile_s], "ms")
    return taken


def real(pool: CompilePool) -> None:
    """The share of schemas as people write them: as they are, with annotations, and lenient."""
    listed = [*REAL.values(), *PYDANTIC.values()]
    for name, options in (("as they are", {}), ("annotations", {"annotations": True}), ("lenient", {"lenient": True})):
        found = [compiled(pool, schema, **options) for schema in listed]
        taken = sum(isinstance(one, Grammar) for one in found)
        print(f"schemas as people write them, {name}: {taken} of {len(listed)} ({taken / len(listed):.1%})")


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
        matcher, text = grammar.matcher(), b""
        for _ in range(STEPS):
            timed("mask fill", matcher.fill_mask, row)
            way = timed("completion", matcher.completion, 200)
            tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(rng.choice(tokens))
            timed("accept", matcher.accept, token)
            timed("rollback of 1", matcher.rollback, 1)
            if way is not None:
                checked += 1
                false += not _is_valid(schema, text + b"".join(vocabulary.token_bytes[t] for t in way))
            matcher.accept(token)
            text += vocabulary.token_bytes[token]
            if matcher.is_terminated:
                break
    for name, times in costs.items():
        show(name, times, "us")
    print(f"texts completed and judged by jsonschema-rs: {checked}, false accepts {false}")


def _is_valid(schema: Any, text: bytes) -> bool:
    value = json.loads(text)
    return "inf" in repr(value).lower() or bool(
        reference_validator(schema).is_valid(value)
    )  # 1e999 is JSON, and no float


def applying(width: int) -> None:
    """The sampler's own masking of 16 rows: a bias looked up for each byte of a mask, and added."""
    operations, logits = NumpyLogitOperations(), np.zeros((BATCH, width), np.float32)
    for name, share in (("dense", 0.99), ("half", 0.5), ("sparse", 0.001)):
        packed = np.packbits(np.random.default_rng(0).random((BATCH, width)) < share, axis=1, bitorder="little")
        mask, times = TokenMask(list(range(BATCH)), np.ascontiguousarray(packed).view(np.int32), {}), list[float]()
        for _ in range(200):
            begun = time.perf_counter_ns()
            operations.apply_mask(logits, mask)
            times.append((time.perf_counter_ns() - begun) / 1e3)
            logits.fill(0)
        show(f"mask applied to {BATCH} rows, {name}", times[20:], "us")


def show(name: str, times: list[float], unit: str) -> None:
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{name:42} p50 {p50:9.2f} {unit}   p99 {p99:9.2f} {unit}   of {len(times)}")


def decoding(client: Client, streams: int, rounds: int) -> None:
    """JSON and free texts of the same lengths, in turn: the medians of both and their ratio."""
    seen = itertools.count()
    speeds: dict[str, list[float]] = {"json": [], "free": []}
    forced = list[float]()

    def start(max_tokens: int, constraint: Any = None, **fields: Any) -> Call:
        session = client.open_session()
        session.append(f"Here is the record of person number {next(seen)}, as JSON:\n")
        call = session.generate(sampling_params(max_tokens=max_tokens, temperature=0.0, **fields), constraint)
        session.close()
        return call

    for round_number in range(rounds + 1):  # the first warms up
        lengths = list[int]()
        for side, found in speeds.items():
            begun = time.perf_counter()
            if side == "json":
                calls = [start(400, RECORD) for _ in range(streams)]
            else:
                calls = [start(length, ignore_eos=True) for length in lengths]
            results = [call.result() for call in calls]
            if round_number:
                found.append(sum(len(result.token_ids) for result in results) / (time.perf_counter() - begun))
            if side == "json":
                lengths = [len(result.token_ids) for result in results]
                forced += [result.usage.forced_tokens / len(result.token_ids) for result in results]
                for result in results:
                    json.loads(result.text)
    free, constrained = (statistics.median(speeds[side]) for side in ("free", "json"))
    print(
        f"{streams:3} streams, a record of 8 fields: JSON {constrained:6.1f} tok/s, free {free:6.1f} tok/s, "
        f"ratio {constrained / free:.2f}; {statistics.mean(forced):.0%} of the tokens forced"
    )


if __name__ == "__main__":
    main()
