"""What share of real schemas, and of the official test suite of JSON Schema, is compiled and right, keyword by keyword.

python benchmarks/schema_coverage.py CORPUS.jsonl [--suite FOLDER] [--walks N] [--deadline S] [--out REPORT.json]

CORPUS is what schema_corpus.py writes; FOLDER the suite's `tests`, whose drafts 7 and 2020-12 are run. Texts
that random walks under the masks complete are validated by jsonschema-rs, formats asserted. A schema of the suite is
right if all its valid values are accepted, in some order of their names, and no other; a value is spelled canonically,
and formats are asserted. The suite is in the source distribution of jsonschema: peers_suites.py fetches it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "constrained"))
from schema_strategies import BYTE_VOCABULARY, EOS_ID, accepts, exceeds_double_range, grammar_of

from plait.constrained import Grammar, GrammarError, JsonSchema, compile_grammar
from plait.constrained.json_schema.rewrite.document import subschemas

SCHEMA_URIS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
STEPS, MAX_ORDERS = 60, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--walks", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds by the clock for a schema")
    parser.add_argument("--out", type=Path, help="refusals, one JSON object a line")
    arguments = parser.parse_args()
    report = corpus(arguments.corpus, arguments.walks, arguments.deadline)
    if arguments.suite:
        report += suite(arguments.suite)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(entry) + "\n" for entry in report))


def corpus(path: Path, walks: int, deadline_s: float) -> list[dict[str, Any]]:
    """Compiles every schema of the corpus and judges walks; prints the refusals by keyword."""
    entries = [json.loads(line) for line in path.open()]
    refused: collections.Counter[str] = collections.Counter()
    having: collections.Counter[str] = collections.Counter()
    report, times, num_wrong, num_walked = list[dict[str, Any]](), list[float](), 0, 0
    for at, entry in enumerate(entries):
        having.update({name for _, part in subschemas(entry["schema"], "") for name in part})
        begun = time.perf_counter()
        grammar = compiled_in_time(entry["schema"], deadline_s)
        times.append(time.perf_counter() - begun)
        if isinstance(grammar, GrammarError):
            keyword = keyword_of(grammar)
            refused[keyword] += 1
            report.append(describe(entry, grammar))
            continue
        judge = jsonschema_rs.validator_for(entry["schema"], validate_formats=True, offline=True)
        texts = [text for _ in range(walks) if (text := walked(grammar, random.Random(at))) is not None]
        wrong = [text for text in texts if not exceeds_double_range(text) and not judge.is_valid(json.loads(text))]
        num_walked, num_wrong = num_walked + len(texts), num_wrong + len(wrong)
        report += [{"source": entry["source"], "name": entry["name"], "wrong": text} for text in wrong]
    taken = len(entries) - sum(refused.values())
    print(f"corpus: {len(entries)} schemas, compiled {taken} ({taken / len(entries):.1%})")
    print(f"completed texts {num_walked}, of which invalid {num_wrong}")
    times.sort()
    print(f"compile p50 {1e3 * times[len(times) // 2]:.1f} ms, p99 {1e3 * times[int(len(times) * 0.99)]:.0f} ms")
    for keyword, count in refused.most_common():
        print(f"  {keyword:24} refused {count:4} ({count / len(entries):.1%}), in {having[keyword]} schemas")
    return report


def compiled(schema: Any) -> Grammar | GrammarError:
    try:
        return grammar_of(schema)
    except GrammarError as error:
        return error


def compiled_in_time(schema: Any, deadline_s: float) -> Grammar | GrammarError:
    """Compiles in a worker process, which is ended at the deadline."""
    try:
        return compile_grammar(JsonSchema(schema, compact=True), BYTE_VOCABULARY, deadline_s)
    except GrammarError as error:
        return error


def keyword_of(error: GrammarError) -> str:
    """Returns the last keyword in the pointer of a refusal."""
    steps = [step for step in str(error.where or "").split("/") if step and not step.isdigit()]
    return steps[-1] if steps else error.reason[:40]


def describe(entry: dict[str, Any], error: GrammarError) -> dict[str, Any]:
    return {"source": entry["source"], "name": entry["name"], "where": error.where, "reason": error.reason}


def walked(grammar: Grammar, rng: random.Random) -> str | None:
    """Returns a random text under the masks, completed; None if none was found in 3,000 bytes."""
    matcher, text = grammar.matcher(), bytearray()
    row = np.zeros(9, np.int32)
    for _ in range(rng.randrange(STEPS)):
        matcher.fill_mask(row)
        allowed = [t for t in range(257) if row[t // 32] >> (t % 32) & 1 and t != EOS_ID]
        if not allowed:
            break
        token = rng.choice(allowed)
        if not matcher.accept(token):
            break
        text.append(token - 1)
    rest = matcher.completion(3000)
    if rest is None:
        return None
    text += b"".join(BYTE_VOCABULARY.token_bytes[token] for token in rest)
    return text.decode()


def suite(folder: Path) -> list[dict[str, Any]]:
    """Runs the required tests of two drafts; prints how many schemas are right, and the others by file."""
    report, verdicts = list[dict[str, Any]](), collections.Counter[str]()
    by_file: collections.Counter[str] = collections.Counter()
    for draft, file, group in groups(folder):
        grammar = compiled(group["schema"])
        name = {"source": draft, "name": f"{file}: {group['description']}"}
        if isinstance(grammar, GrammarError):
            verdict = "no value" if not any(test["valid"] for test in group["tests"]) else "refused"
            report.append({**name, "where": grammar.where, "reason": grammar.reason, "verdict": verdict})
        else:
            accepts_text = partial(accepts, grammar)
            wrong = [t for t in group["tests"] if accepts_some_order(accepts_text, t["data"]) is not t["valid"]]
            verdict = "wrong" if any(not t["valid"] for t in wrong) else "incomplete" if wrong else "right"
            report += [{**name, "verdict": verdict, "data": t["data"], "valid": t["valid"]} for t in wrong]
        verdicts[verdict] += 1
        by_file[f"{file} {verdict}"] += verdict not in ("right", "no value")
    print("suite:", dict(verdicts))
    for file, count in by_file.most_common():
        if count:
            print(f"  {file} {count}")
    return report


def groups(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Yields draft, file and group of each schema of the suite that names no other document, `$schema` included.

    The tests of format.json say that a format is not asserted. Their values are judged with formats asserted instead.
    """
    for draft, uri in SCHEMA_URIS.items():
        for path in sorted((folder / draft).glob("*.json")):
            for group in json.loads(path.read_text()):
                schema = group["schema"]
                if "localhost:1234" in json.dumps(schema):
                    continue
                if isinstance(schema, dict):
                    schema.setdefault("$schema", uri)
                if path.stem == "format":
                    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
                    group["tests"] = [{**test, "valid": judge.is_valid(test["data"])} for test in group["tests"]]
                yield draft, path.stem, group


def accepts_some_order(accepts_text: Callable[[str], bool], value: Any) -> bool:
    texts = (json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in orders(value))
    return any(accepts_text(text) for text in itertools.islice(texts, MAX_ORDERS))


def orders(value: Any) -> Iterator[Any]:
    """Yields a value with the names of its objects in every order; 1.0 becomes 1."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for items in itertools.product(*(list(itertools.islice(orders(value[name]), 6)) for name in names)):
                yield dict(zip(names, items, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(itertools.islice(orders(item), 6)) for item in value)))
    elif isinstance(value, float) and value.is_integer() and abs(value) <= 1 << 53:
        yield int(value)
    else:
        yield value


if __name__ == "__main__":
    main()
