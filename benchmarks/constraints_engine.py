"""What constraints do to a running engine: JSON against free decoding, and neighbours while bombs are compiled.

python benchmarks/constraints_engine.py [--streams 1,16] [--rounds 3] [--seconds 20]

Both sides of every ratio run in turn on one engine. Tokens count as the text has them, forced ones included. The
bombs are schemas and patterns made to be expensive; a new one is sent whenever one is answered.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from plait.constrained import GrammarError, JsonSchema, Regex
from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.errors import CallFailed
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
    parser.add_argument("--seconds", type=float, default=20.0, help="how long neighbours decode beside the bombs")
    parser.add_argument(
        "--throw", metavar="ADDRESS", help="be the one who sends bombs to this runtime, until told to end"
    )
    options = parser.parse_args(arguments)
    if options.throw:
        throw(options.throw)
        return
    with Runtime() as runtime:
        client = runtime.client
        for streams in map(int, options.streams.split(",")):
            speed(client, streams, options.rounds)
        neighbours(runtime, options.seconds)


# -- speed ---------------------------------------------------------------------------------------------


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


# -- neighbours ----------------------------------------------------------------------------------------


def bombs() -> dict[str, Any]:
    deep: Any = {"type": "integer"}
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}
    return {
        "deep nesting": lambda: JsonSchema(deep),
        "50,000 members": lambda: JsonSchema({"enum": [f"member {i}" for i in range(50_000)]}),
        "a billion items": lambda: JsonSchema({"type": "array", "maxItems": 10**9, "minItems": 10**9}),
        "doubling $ref": lambda: JsonSchema({"$ref": "#/$defs/d0", "$defs": doubling}),
        "remote $ref": lambda: JsonSchema({"$ref": "https://example.com/schema.json"}),
        "(a{1,1000}){1,1000}": lambda: Regex("(a{1,1000}){1,1000}"),
        "three times {0,100}": lambda: Regex("((a{0,100}){0,100}){0,100}"),
        ".*a.{25}": lambda: Regex(".*a.{25}"),
        "1 MB literal": lambda: JsonSchema({"const": "x" * 1_000_000}),
        "no value": lambda: JsonSchema({"allOf": [{"type": "integer"}, {"type": "string"}]}),
        "(": lambda: Regex("("),
    }


def neighbours(runtime: Runtime, seconds: float, streams: int = 8) -> None:
    """Inter-token latency of `streams` free texts, quiet and while another process sends bombs, in turns."""
    gaps: dict[str, list[float]] = {"quiet": [], "bombs": []}
    slowest: dict[str, float] = {}
    for side in ("quiet", "bombs") * 3:
        command = [sys.executable, "-P", __file__, "--throw", str(runtime.address)]
        attack = None
        if side == "bombs":
            attack = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert attack.stdout is not None
            attack.stdout.readline()  # it has thrown the first
        watched = [
            threading.Thread(target=watch, args=(runtime.client, i, seconds / 3, gaps[side])) for i in range(streams)
        ]
        for thread in watched:
            thread.start()
        for thread in watched:
            thread.join()
        if attack is not None:
            out, _ = attack.communicate("enough\n", timeout=60)
            for name, spent in json.loads(out.splitlines()[-1]).items():
                slowest[name] = max(spent, slowest.get(name, 0.0))
    for side, values in gaps.items():
        p50, p99 = np.percentile(np.array(values) * 1e3, [50, 99])
        print(f"{streams} neighbours, {side}: inter-token p50 {p50:6.1f} ms  p99 {p99:6.1f} ms  of {len(values)}")
    ratio = np.percentile(gaps["bombs"], 99) / np.percentile(gaps["quiet"], 99)
    print(f"p99 with bombs over p99 without: {ratio:.2f}")
    for name, spent in sorted(slowest.items(), key=lambda item: -item[1]):
        print(f"  {name:24} answered within {spent * 1e3:7.0f} ms")


def watch(client: Client, number: int, seconds: float, gaps: list[float]) -> None:
    """Decodes for `seconds` and notes the time between pieces."""
    call = start(client, number, 4000, ignore_eos=True)
    until, last = time.perf_counter() + seconds, 0.0
    for _ in call.iter_text():
        now = time.perf_counter()
        if last:
            gaps.append(now - last)
        last = now
        if now > until:
            call.abort()
            return


def throw(address: str) -> None:
    """One bomb after the other until a line comes in; prints a line first, and the slowest answers last."""
    os.nice(19)  # the client's own work is not what is measured
    slowest: dict[str, float] = {}
    with Runtime.connect(address) as runtime:
        for name, make in itertools.cycle(bombs().items()):
            begun = time.perf_counter()
            with contextlib.suppress(CallFailed, GrammarError):  # refused, which is an answer as good as any
                start(runtime.client, 0, 4, make()).result()
            spent = time.perf_counter() - begun
            if not slowest:
                print("thrown", flush=True)
            slowest[name] = max(slowest.get(name, 0.0), spent)
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    print(json.dumps(slowest))


if __name__ == "__main__":
    main()
