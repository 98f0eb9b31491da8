"""What expensive constraints of one key cost the other keys: the time between their tokens, and their own constraints.

python benchmarks/constraints_beside_bombs.py [--pairs 10] [--seconds 20] [--streams 8] [--in-flight 8]

Free texts of one key decode in pairs of a quiet and an attacked time, in alternating order. Meanwhile a second key asks
for one token under a schema that was never seen, twice a second, once small and once large. In the attacked time
another process of niceness 19 keeps expensive constraints of a third key in flight, none of them seen before, so that
no answer comes from the cache. Printed are the medians over the pairs: of the ratios of the median and of the 99th
percentile between tokens (to hold: at most 1.1), and of the differences of the median wait for a schema (to hold: at
most 100 ms).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.options import parsed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "constrained"))
from expensive_specs import EXPENSIVE_SPECS

from plait.constrained import Choices, Ebnf, GrammarError, JsonSchema, Lark, Regex, Spec
from plait.runtime.client.call import Call
from plait.runtime.client.client import Client
from plait.runtime.errors import CallFailed
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

SETTLE_S = 1.0  # after the first bomb, before anything is measured
SIZES = (8, 200)  # fields of the second key's schemas
SAME_STEP_S = 0.001  # pieces that arrive closer together are tokens of one step


@dataclass
class Times:
    """Seconds that one side of a pair measured.

    `gaps`: between the tokens of two steps of a stream. `waits`: until the first token under a schema, by its fields.
    """

    gaps: list[float] = field(default_factory=list)
    waits: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in SIZES})


def main() -> None:
    options = parsed(__doc__, pairs=10, seconds=20.0, streams=8, in_flight=8, attack=None)
    if options.attack:
        attack(options.attack, options.in_flight)
        return
    with Runtime() as runtime:
        start(runtime.client, "b", 1, JsonSchema({"type": "null"})).result()
        pairs = list[list[Times]]()
        for number in range(options.pairs):
            order = (False, True) if number % 2 else (True, False)
            sides = {is_attacked: side(runtime, options, is_attacked) for is_attacked in order}
            pairs.append([sides[False], sides[True]])
            for name, times in zip(("quiet", "attacked"), pairs[-1], strict=True):
                show(name, times)
    for percent in (50, 99):
        ratios = [
            np.percentile(attacked.gaps, percent) / np.percentile(quiet.gaps, percent) for quiet, attacked in pairs
        ]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"p{percent} between tokens, attacked over quiet: {np.median(ratios):.3f} {spread}")
    for size in SIZES:
        more = [1e3 * (np.median(attacked.waits[size]) - np.median(quiet.waits[size])) for quiet, attacked in pairs]
        print(
            f"a schema of {size} fields waits longer by {np.median(more):.0f} ms ({min(more):.0f} to {max(more):.0f})"
        )


def show(name: str, times: Times) -> None:
    p50, p99 = 1e3 * np.percentile(times.gaps, [50, 99])
    waits = ", ".join(
        f"a schema of {size} fields {1e3 * np.median(found):.0f} ms (at most {1e3 * max(found):.0f})"
        for size, found in times.waits.items()
    )
    print(f"{name:9} between tokens p50 {p50:6.1f}, p99 {p99:6.1f} ms of {len(times.gaps)}; {waits}", flush=True)


def start(client: Client, tenant: str, max_tokens: int, constraint: Spec | None = None, **fields: Any) -> Call:
    session = client.open_session(tenant=tenant)
    session.append("The name of the first person on the list is")
    call = session.generate(sampling_params(max_tokens=max_tokens, temperature=0.0, **fields), constraint)
    session.close()
    return call


def side(runtime: Runtime, options: argparse.Namespace, is_attacked: bool) -> Times:
    command = [sys.executable, __file__, "--attack", str(runtime.address), "--in-flight", str(options.in_flight)]
    if is_attacked:
        command, pipe = ["nice", "-n", "19", *command], subprocess.PIPE
        attacker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert attacker.stdout is not None
        if not attacker.stdout.readline():
            raise RuntimeError("the attacker did not begin")
        time.sleep(SETTLE_S)
    times, until = Times(), time.perf_counter() + options.seconds
    with ThreadPoolExecutor(options.streams + 1) as pool:
        sides = [pool.submit(watch, runtime.client, until, times.gaps) for _ in range(options.streams)]
        sides.append(pool.submit(ask, runtime.client, until, times))
    for one in sides:
        one.result()
    if is_attacked:
        attacker.communicate("enough\n", timeout=60)
        if attacker.returncode:
            raise RuntimeError("the attacker failed")
    return times


def watch(client: Client, until: float, gaps: list[float]) -> None:
    """Decodes free texts and notes the time between their pieces."""
    while time.perf_counter() < until:
        call, last = start(client, "a", 4000, ignore_eos=True), 0.0
        for _ in call.iter_text():
            now = time.perf_counter()
            if last and now - last > SAME_STEP_S:
                gaps.append(now - last)
            last = now
            if now > until:
                call.abort()
                return


_numbers = itertools.count()


def ask(client: Client, until: float, times: Times) -> None:
    """Asks for a token under a new schema, twice a second, and notes how long that takes."""
    while time.perf_counter() < until:
        for size in SIZES:
            begun = time.perf_counter()
            with contextlib.suppress(CallFailed):
                start(client, "b", 1, honest(next(_numbers), size)).result()
            times.waits[size].append(time.perf_counter() - begun)
            time.sleep(max(0.0, begun + 0.5 - time.perf_counter()))


def honest(number: int, num_fields: int) -> JsonSchema:
    """A record as people write them; one of 200 fields has 18,000 characters."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40, "description": "As it is written in the document."},
        {"type": "integer", "minimum": 0, "maximum": 120, "description": "In years."},
        {"enum": ["engineer", "teacher", "doctor"], "description": "The first that fits."},
        {"type": ["string", "null"], "format": "date", "description": "The day, if it is known."},
    ]
    fields = {f"field_{number}_{at}": kinds[at % len(kinds)] for at in range(num_fields)}
    return JsonSchema({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})


def attack(address: str, in_flight: int) -> None:
    """Keeps expensive constraints in flight until a line comes in; prints a line after the first."""
    waiting, specs = list[Any](), list[Spec]()
    for make in EXPENSIVE_SPECS.values():  # here, since attackers elsewhere take no processor time
        with contextlib.suppress(GrammarError):  # refused in the client
            specs.append(make())
    with Runtime.connect(address) as runtime:
        for number, spec in enumerate(itertools.cycle(specs)):
            waiting.append(start(runtime.client, "c", 4, unlike_others(spec, time.time_ns() + number)))
            if number == 0:
                print("begun", flush=True)
            while len(waiting) >= in_flight:
                waiting = [call for call in waiting if not call.done()]
                if select.select([sys.stdin], [], [], 0.01)[0]:
                    return


def unlike_others(spec: Spec, number: int) -> Spec:
    """Returns a spec of about the same cost that no cache has an answer for."""
    match spec:
        case JsonSchema():
            return JsonSchema(f'{{"$comment":"{number}",{spec.text[1:]}')
        case Regex():
            return Regex(f"(?:{spec.pattern})|{number}")
        case Choices():
            return Choices((*spec.choices, str(number)))
        case Ebnf():
            return Ebnf(f"{spec.grammar}\n# {number}\n")
    assert isinstance(spec, Lark)
    return Lark(f"{spec.grammar}\n// {number}\n")


if __name__ == "__main__":
    main()
