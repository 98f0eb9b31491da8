"""What constraints cost: compiling, masks, completions, and the share of schemas that are taken.

    python benchmarks/constraints.py [--schemas FILE.jsonl] [--limit N]

Compiles in this process what a child of the pool would, so the times are the child's own clock. Without a file
the schemas are those of the tests (tests/support/schema_table.py, each in five surroundings, and the refused
ones); a file holds one schema a line. The vocabulary is the embedded model's, 49,152 tokens.

Knows: the public constraints, and NumPy. Must not know: schedulers or models.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from plait.constrained import Grammar, GrammarError, JsonSchema, Vocabulary, mask_words
from plait.constrained.dispatch import as_grammar, compile_form
from plait.runtime.models.locate import locate_model
from plait.runtime.tokenizer.tokenizer import load_tokenizer

STEPS, ROWS = 40, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schemas", type=Path, help="a file with one JSON Schema a line")
    parser.add_argument("--limit", type=int, default=2000, help="how many schemas at most")
    arguments = parser.parse_args()
    vocabulary = load_tokenizer(locate_model(None)).vocabulary
    schemas = read(arguments.schemas)[: arguments.limit]
    compile_one(schemas[0], vocabulary)
    grammars = compiling(schemas, vocabulary)
    walking(grammars, vocabulary)
    applying(len(vocabulary))


def read(path: Path | None) -> list[Any]:
    """The schemas of `path`, or of the tests."""
    if path is not None:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from schema_table import REFUSED, ROWS, variants

    return [schema for row in ROWS for _, (schema, _, _) in variants(row)] + [schema for schema, _, _ in REFUSED]


def compile_one(schema: Any, vocabulary: Vocabulary) -> tuple[float, Grammar | GrammarError]:
    """(ms that the child takes, the grammar or why not)."""
    begun = time.perf_counter()
    try:
        form = compile_form(JsonSchema(schema), vocabulary)
    except GrammarError as error:
        return (time.perf_counter() - begun) * 1e3, error
    spent = (time.perf_counter() - begun) * 1e3
    return spent, as_grammar(form, vocabulary)


def compiling(schemas: list[Any], vocabulary: Vocabulary) -> list[Grammar]:
    answers = [compile_one(schema, vocabulary) for schema in schemas]
    taken = [answer for _, answer in answers if isinstance(answer, Grammar)]
    print(
        f"schemas: {len(schemas)}, taken {len(taken)} ({len(taken) / len(schemas):.1%}), the rest refused with a reason"
    )
    show("compile", [ms for ms, _ in answers], "ms")
    return taken


def walking(grammars: list[Grammar], vocabulary: Vocabulary) -> None:
    """Random texts under the masks: the times of each mask, of an accepted token, and of a completion."""
    rng, row = random.Random(1), np.zeros(mask_words(len(vocabulary)), np.int32)
    masks, accepts, completions = list[float](), list[float](), list[float]()
    for grammar in rng.sample(grammars, min(300, len(grammars))):
        matcher = grammar.matcher()
        for _ in range(STEPS):
            begun = time.perf_counter()
            matcher.fill_mask(row)
            masks.append((time.perf_counter() - begun) * 1e6)
            begun = time.perf_counter()
            matcher.completion(200)
            completions.append((time.perf_counter() - begun) * 1e6)
            tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(rng.choice(tokens))
            begun = time.perf_counter()
            matcher.accept(token)
            accepts.append((time.perf_counter() - begun) * 1e6)
            if matcher.is_terminated:
                break
    show("mask fill", masks, "us")
    show("accept", accepts, "us")
    show("completion", completions, "us")


def applying(width: int) -> None:
    """Adding the bias that each byte of a mask stands for, 16 rows at once, dense, half and sparse."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = np.where(bits, np.float32(0), np.float32(-np.inf))
    logits = np.zeros((ROWS, width), np.float32)
    for name, share in (("dense", 0.99), ("half", 0.5), ("sparse", 0.001)):
        packed = np.packbits(np.random.default_rng(0).random((ROWS, width)) < share, axis=1, bitorder="little")
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            logits += table[packed].reshape(ROWS, -1)[:, :width]
            times.append((time.perf_counter() - begun) * 1e6)
            logits[:] = 0
        show(f"mask applied with NumPy, {ROWS} rows, {name}", times, "us")


def show(name: str, times: list[float], unit: str) -> None:
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{name:42} p50 {p50:9.2f} {unit}   p99 {p99:9.2f} {unit}   of {len(times)}")


if __name__ == "__main__":
    main()
