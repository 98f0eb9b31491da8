"""Holds the grammars of generated schemas against jsonschema-rs, in both directions.

Every text that a random walk under the masks finishes must be valid, and every valid value must be accepted in some
order of its names, or a warning of the grammar says that values are left out. The validator reads the numbers of a text
as decimals, since a JSON number is one of any precision (JSON Schema, core 4.2.1): `7495790477026279112574.0` is a
multiple of 3, although the double next to it is not. By hand, for many values, in chunks that a later run goes on
behind:

    PYTHONPATH=tests/support/constrained python tests/support/constrained/schema_fuzzer.py fuzz.jsonl --values 500000
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import partial
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
    compact,
    exceeds_double_range,
    grammar_of,
    reference_validator,
)

from plait.constrained import Grammar, GrammarError

CHUNK = 100  # schemas
VALUES_OF_A_SCHEMA = 12
WALKS_OF_A_SCHEMA = 6
Report = Callable[[str, Any, str], None]
"""Takes what was found ("wrong", "lost", "left out" with a warning, "refused", ...), the schema, and the text or the
reason."""


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


class Writer:
    """Tries to write a value under a grammar, with the names of its objects in any order and each spelling of a number.

    After `max_tries` names and texts it gives up.
    """

    def __init__(self, grammar: Grammar, max_tries: int = 4000) -> None:
        self._matcher, self._tries = grammar.matcher(), max_tries

    def writes(self, value: Any) -> bool:
        try:
            return self._value(value, lambda: self._matcher.is_accepting)
        except GrammarError as error:  # a limit of llguidance
            if "Current row has" not in error.reason:
                raise
            return False

    def _value(self, value: Any, then: Callable[[], bool]) -> bool:
        if isinstance(value, list):
            return self._text("[", lambda: self._items(value, then))
        if isinstance(value, dict):
            return self._text("{", lambda: self._members(value, "", then))
        texts = [compact(value)]
        if isinstance(value, float) and value.is_integer():
            texts.insert(0, compact(int(value)))
        return any(self._text(text, then) for text in texts)

    def _items(self, items: list[Any], then: Callable[[], bool]) -> bool:
        if not items:
            return self._text("]", then)
        behind = "," if items[1:] else ""
        return self._value(items[0], lambda: self._text(behind, lambda: self._items(items[1:], then)))

    def _members(self, members: dict[str, Any], before: str, then: Callable[[], bool]) -> bool:
        if not members:
            return self._text("}", then)
        for name in members:
            rest = {other: value for other, value in members.items() if other != name}
            follow = partial(self._members, rest, ",", then)
            if self._text(f"{before}{compact(name)}:", partial(self._value, members[name], follow)):
                return True
        return False

    def _text(self, text: str, then: Callable[[], bool]) -> bool:
        self._tries -= 1
        count = 0
        for byte in text.encode():
            if self._tries < 0 or not self._matcher.accept(1 + byte):
                break
            count += 1
        if count == len(text.encode()) and then():
            return True
        self._matcher.rollback(count)
        return False


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
        is_accepted = Writer(grammar).writes(value)
        report("valid value" if is_valid else "invalid value", schema, "")
        if is_accepted and not is_valid:
            report("wrong", schema, compact(value))
        elif is_valid and not is_accepted:
            report("left out" if grammar.warnings else "lost", schema, compact(value))
    for _ in range(WALKS_OF_A_SCHEMA):
        try:
            text = random_text(grammar, rng)
        except GrammarError as error:
            report("dead end", schema, error.reason)
            continue
        if text is not None and not exceeds_double_range(text):
            report("finished text", schema, "")
            if not validator.is_valid(json.loads(text, parse_float=Decimal)):
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
