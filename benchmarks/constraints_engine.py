"""JSON against free decoding on a running engine, in turn. Tokens count as the text has them, forced ones included.

python benchmarks/constraints_engine.py [--streams 1,16] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

from plait.constrained import JsonSchema
from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

RECORD = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 24},
        "date_of_birth": {"type": "string", "format": "date"},
        "email_address": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,10}\\.(com|org|net)$"},
        "occupation": {"enum": ["engineer", "teacher", "doctor", "farmer", "artist"]},
        "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 60},
        "is_available": {"type": "boolean"},
        "preferred_language": {"enum": ["English", "Spanish", "Mandarin", "Hindi", "Arabic"]},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": [
        *("full_name", "date_of_birth", "email_address", "occupation"),
        *("years_of_experience", "is_available", "preferred_language", "favourite_colours"),
    ],
    "additionalProperties": False,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default="1,16", help="how many texts at once, several numbers with commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side; the medians are compared")
    options = parser.parse_args(arguments)
    with Runtime() as runtime:
        client = runtime.client
        for streams in map(int, options.streams.split(",")):
            speed(client, streams, options.rounds)


def start(client: Client, number: int, max_tokens: int, constraint: Any = None, **fields: Any) -> Call:
    session = client.open_session()
    session.append(f"Here is the record of person number {number}, as JSON:\n")
    call = session.generate(sampling_params(max_tokens=max_tokens, temperature=0.0, **fields), constraint)
    session.close()
    return call


def speed(client: Client, streams: int, rounds: int) -> None:
    """Prints the medians of both sides and their ratio."""
    spec, seen = JsonSchema(RECORD), itertools.count()
    sides: dict[str, list[float]] = {"free": [], "json": []}
    forced = list[float]()
    for round_number in range(rounds + 1):  # the first warms up
        lengths = list[int]()
        for side in ("json", "free"):
            begun = time.perf_counter()
            if side == "json":
                calls = [start(client, next(seen), 400, spec) for _ in range(streams)]
            else:
                calls = [start(client, next(seen), n, ignore_eos=True) for n in lengths]
            results = [call.result() for call in calls]
            spent = time.perf_counter() - begun
            if round_number:
                sides[side].append(sum(len(r.token_ids) for r in results) / spent)
            if side == "json":
                lengths = [len(result.token_ids) for result in results]
                forced += [result.usage.forced_tokens / len(result.token_ids) for result in results]
                for result in results:
                    json.loads(result.text)
    free, constrained = statistics.median(sides["free"]), statistics.median(sides["json"])
    print(
        f"{streams:3} streams, a record of 8 fields: JSON {constrained:6.1f} tok/s, free {free:6.1f} tok/s, "
        f"ratio {constrained / free:.2f}; {statistics.mean(forced):.0%} of the tokens forced"
    )


if __name__ == "__main__":
    main()
