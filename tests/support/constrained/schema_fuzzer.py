"""Holds the grammars of generated schemas against jsonschema-rs, in both directions.

Every text that a random walk under the masks finishes must be valid, and every valid value should be accepted in some
order of its names. By hand, for many values, in chunks that a later run goes on behind:

    PYTHONPATH=tests/support/constrained python tests/support/constrained/schema_fuzzer.py fuzz.jsonl --values 500000
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from matchers import allowed_tokens
from schema_strategies import (
    ALL_SCHEMAS,
    ALL_VALUES,
    BYTE_VOCABULARY,
    EOS_ID,
    accepts,
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import Grammar, GrammarError

CHUNK = 100  # schemas
VALUES_OF_A_SCHEMA = 12
WALKS_OF_A_SCHEMA = 6
MAX_ORDERS = 24
Report = Callable[[str, Any, str], None]
"""Takes what was found ("wrong", "lost", "refused", ...), the schema, and the text or the reason."""


def random_text(grammar: Grammar, rng: random.Random, length: int = 60) -> str | None:
    """Returns a text sampled under the masks, mostly of structural characters, and completed; None if it is long."""
    matcher, text = grammar.matcher(), bytearray()
    for _ in range(rng.randrange(length)):
        if matcher.is_accepting and rng.random() < 0.5:
            return text.decode()
        allowed = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
        if not allowed:
            break
        likely = [token for token in allowed if chr(token - 1) in '"}],:0123456789abtfn-. ']
        token = rng.choice(likely if likely and rng.random() < 0.8 else allowed)
        assert matcher.accept(token)
        text.append(token - 1)
    rest = matcher.completion(200)
    return None if rest is None else (text + bytes(token - 1 for token in rest)).decode()


def orders(value: Any) -> Iterator[Any]:
    """Yields a value with the names of its objects in each order."""
    if isinstance(value, list):
        yield from map(list, product(*(list(islice(orders(item), MAX_ORDERS)) for item in value)))
    elif isinstance(value, dict):
        for names in permutations(value):
            for inner in product(*(list(islice(orders(value[name]), MAX_ORDERS)) for name in names)):
                yield dict(zip(names, inner, strict=True))
    else:
        yield value


def check_schema(schema: Any, values: list[Any], rng: random.Random, report: Report) -> None:
    """Reports where the grammar of a schema and the reference validator disagree, and what was compared."""
    validator = reference_validator(schema)
    try:
        grammar = grammar_of(schema)
    except GrammarError as error:
        has_value = any(validator.is_valid(value) for value in values)
        report("lost" if "no value" in error.reason and has_value else "refused", schema, error.reason)
        return
    except Exception as error:  # a fault of the compiler, which must refuse instead
        report("crash", schema, repr(error))
        return
    for value in values:
        is_valid = validator.is_valid(value)
        is_accepted = any(accepts(grammar, compact(one)) for one in islice(orders(value), MAX_ORDERS))
        report("valid value" if is_valid else "invalid value", schema, "")
        if is_accepted is not is_valid:
            report("lost" if is_valid else "wrong", schema, compact(value))
    for _ in range(WALKS_OF_A_SCHEMA):
        try:
            text = random_text(grammar, rng)
        except GrammarError as error:
            report("dead end", schema, error.reason)
            continue
        if text is not None and not exceeds_double_range(text):
            report("finished text", schema, "")
            if not validator.is_valid(json.loads(text)):
                report("wrong", schema, text)


def check_chunk(number: int, report: Report) -> None:
    """Checks the schemas of one chunk, which are the same in every run."""

    @seed(number)
    @settings(
        max_examples=CHUNK,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(ALL_SCHEMAS, st.lists(ALL_VALUES, min_size=VALUES_OF_A_SCHEMA, max_size=VALUES_OF_A_SCHEMA))
    def check(schema: Any, values: list[Any]) -> None:
        check_schema(schema, values, random.Random(json.dumps(schema)), report)

    check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "log", type=Path, help="what was found, one JSON object a line; a run goes on behind its last chunk"
    )
    parser.add_argument("--values", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=900)
    options = parser.parse_args()
    lines = list(map(json.loads, options.log.read_text().splitlines())) if options.log.exists() else []
    counts = Counter(next((line["counts"] for line in reversed(lines) if "counts" in line), {}))
    number, until = counts["chunks"], time.monotonic() + options.seconds
    while counts["valid value"] + counts["invalid value"] + counts["finished text"] < options.values:
        if time.monotonic() > until:
            break
        found: list[dict[str, Any]] = []

        def report(kind: str, schema: Any, text: str) -> None:
            counts[kind] += 1
            if kind in ("wrong", "lost", "dead end", "crash"):
                found.append({"found": kind, "schema": schema, "text": text})  # noqa: B023

        check_chunk(number, report)
        number += 1
        counts["chunks"] = number
        with options.log.open("a") as log:
            log.writelines(json.dumps(line) + "\n" for line in [*found, {"counts": counts}])
    print(dict(counts))


if __name__ == "__main__":
    main()
