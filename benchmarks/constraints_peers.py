"""Compile time and masks of real schemas: plait, llguidance and outlines-core in one run, on one vocabulary.

python benchmarks/constraints_peers.py CORPUS.jsonl [--schemas 60] [--deadline 2]

CORPUS is what schema_corpus.py writes; the schemas are chosen by a fixed seed. They are compiled in a child process
that is ended at the deadline, since outlines-core can need seconds and gigabytes; it is warmed up before. llguidance
gets the schema as it is, and refuses keywords that it does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import outlines_core

import plait
from plait.constrained import JsonSchema, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.guidance.inner_matcher import tokenizer_of

MEMORY_BYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--schemas", type=int, default=60)
    parser.add_argument("--deadline", type=float, default=2.0)
    arguments = parser.parse_args()
    lines = random.Random(1).sample(arguments.corpus.read_text().splitlines(), arguments.schemas)
    schemas = [json.loads(line)["schema"] for line in lines]
    found = {
        name: in_children(partial(timed, compile_schema), schemas, arguments.deadline)
        for name, compile_schema in libraries(plait.load_vocabulary()).items()
    }
    of_llguidance = [spent is not None for spent in found["llguidance"]]
    for name, times in found.items():
        show(name, times)
        show("  of llguidance's", [spent for spent, also in zip(times, of_llguidance, strict=True) if also])


def timed(compile_schema: Callable[[Any], None], schema: Any) -> float:
    """Returns the seconds until the first mask, in a process that has made some before."""
    if not _is_warm:
        for _ in range(20):
            compile_schema({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}})
        _is_warm.append(True)
    begun = time.perf_counter()
    compile_schema(schema)
    return time.perf_counter() - begun


_is_warm: list[bool] = []


def show(name: str, found: list[float | None]) -> None:
    times = [1e3 * spent for spent in found if spent is not None]
    p50, p90, p99 = np.percentile(times or [0.0], [50, 90, 99])
    share = f"{len(times)} of {len(found)} compile"
    print(f"{name:18} {share:20} to the first mask p50 {p50:8.2f}  p90 {p90:8.2f}  p99 {p99:8.1f} ms")


def libraries(vocabulary: Vocabulary) -> dict[str, Callable[[Any], None]]:
    row = np.zeros(mask_words(len(vocabulary)), np.int32)
    tokenizer = tokenizer_of(vocabulary)
    tokens: dict[bytes, list[int]] = {}
    for token, text in enumerate(vocabulary.token_bytes):
        if text:
            tokens.setdefault(text, []).append(token)
    outlines_vocabulary = outlines_core.Vocabulary(vocabulary.eos_ids[0], tokens)

    def with_plait(schema: Any) -> None:
        build_grammar(compile_spec(JsonSchema(schema), vocabulary), vocabulary).matcher().fill_mask(row)

    def with_llguidance(schema: Any) -> None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error()[:200])

    def with_outlines(schema: Any) -> None:
        pattern = outlines_core.json_schema.build_regex_from_schema(json.dumps(schema))
        guide = outlines_core.Guide(outlines_core.Index(pattern, outlines_vocabulary))
        guide.get_tokens()

    return {"plait": with_plait, "llguidance": with_llguidance, "outlines-core": with_outlines}


def in_children(call: Callable[[Any], Any], items: list[Any], deadline_s: float) -> list[Any]:
    """Returns what `call` returns for each item, in JSON's types; None if it raises, dies or takes too long.

    It runs in a fork of this process, which is replaced if it dies or is late.
    """
    found: list[Any] = []
    while len(found) < len(items):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            run(call, items[len(found) :], writing)
        os.close(writing)
        with os.fdopen(reading) as answers:
            while len(found) < len(items):
                ready, _, _ = select.select([reading], [], [], deadline_s)
                line = answers.readline() if ready else ""
                found.append(json.loads(line) if line else None)
                if not line:
                    break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def run(call: Callable[[Any], Any], items: list[Any], writing: int) -> None:
    """Writes a line for each item, null if `call` raises; then exits."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        for item in items:
            try:
                answer = call(item)
            except Exception:
                answer = None
            os.write(writing, f"{json.dumps(answer)}\n".encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
