"""What compiling costs for schemas that share a library of definitions, stage by stage.

python benchmarks/shared_definitions.py CORPUS.jsonl

CORPUS is what schema_corpus.py writes. Each of its schemas with ten definitions or more is a library; the requests
refer to one of its first twelve definitions and carry all of them. A cache of rewritten definitions could save at most
the time of rewriting that is left when the definitions that are not used are left out.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import plait
from plait.constrained import GrammarError, JsonSchema, Vocabulary
from plait.constrained.json_schema import compiler
from plait.constrained.json_schema.rewrite import document

REQUESTS_OF_LIBRARY, MIN_DEFINITIONS = 12, 10
STAGES = {"_rewritten": "rewriting", "combine_conjunctions": "combining", "ensure_compiles": "llguidance"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    listed = list(requests(parser.parse_args().corpus))
    vocabulary = plait.load_vocabulary()
    compiler.compile_json(JsonSchema({"type": "null"}), vocabulary)
    print(f"{len(listed)} requests, each with its library")
    with mock.patch.object(document, "without_unreachable", lambda schema: schema):
        show("all definitions are read", measured(listed, vocabulary))
    show("only those that are used", measured(listed, vocabulary))


def requests(path: Path) -> Iterator[JsonSchema]:
    for line in path.open():
        schema = json.loads(line)["schema"]
        library = "$defs" if "$defs" in schema else "definitions"
        named = schema.get(library) or {}
        if len(named) >= MIN_DEFINITIONS:
            others = {name: schema[name] for name in ("$schema",) if name in schema}
            for name in list(named)[:REQUESTS_OF_LIBRARY]:
                pointer = f"#/{library}/{document.escape_pointer_token(name)}"
                yield JsonSchema({"$ref": pointer, library: named, **others})


def measured(listed: list[JsonSchema], vocabulary: Vocabulary) -> list[dict[str, float]]:
    """Returns the milliseconds of each stage for each request that compiles."""
    found = []
    for spec in listed:
        times: collections.Counter[str] = collections.Counter()
        stages = {name: timed(getattr(compiler, name), stage, times) for name, stage in STAGES.items()}
        with mock.patch.multiple(compiler, **stages):
            begun = time.perf_counter()
            try:
                compiler.compile_json(spec, vocabulary)
            except GrammarError:
                continue
            times["all"] = 1e3 * (time.perf_counter() - begun)
        found.append(dict(times))
    return found


def timed(call: Callable[..., Any], stage: str, times: collections.Counter[str]) -> Callable[..., Any]:
    def wrapped(*arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            times[stage] += 1e3 * (time.perf_counter() - begun)  # type: ignore[assignment]

    return wrapped


def show(title: str, found: list[dict[str, float]]) -> None:
    print(f"{title}: {len(found)} compile")
    for stage in (*STAGES.values(), "all"):
        times = [one.get(stage, 0.0) for one in found]
        p50, p90, p99 = np.percentile(times, [50, 90, 99])
        print(f"  {stage:12} p50 {p50:7.2f}  p90 {p90:7.2f}  p99 {p99:7.1f} ms, in all {sum(times) / 1e3:6.2f} s")


if __name__ == "__main__":
    main()
