"""What grammars of one tenant cost the others: the wait of a small schema behind slow ones, the time until an expensive
one is refused beside busy streams, and the first constrained call of a runtime.

python benchmarks/constraints_tenants.py [--slow 20] [--streams 4] [--idle-s 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support" / "constrained")]
from expensive_specs import EXPENSIVE_SPECS  # noqa: E402

from plait.constrained import GrammarError, JsonSchema, Regex, Spec  # noqa: E402
from plait.runtime.client.call import Call  # noqa: E402
from plait.runtime.client.client import Client  # noqa: E402
from plait.runtime.errors import CallFailed  # noqa: E402
from plait.runtime.process.runtime import Runtime  # noqa: E402
from plait.runtime.sampling_params import sampling_params  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slow", type=int, default=20, help="slow schemas that one tenant has waiting")
    parser.add_argument("--streams", type=int, default=4, help="free texts that decode beside the expensive specs")
    parser.add_argument("--idle-s", type=float, default=3.0, help="seconds between the start and the first call")
    options = parser.parse_args()
    first_call(options.idle_s)
    with Runtime() as runtime:
        start(runtime.client, "a", 1).result()
        time.sleep(options.idle_s)
        other_tenant(runtime.client, options.slow)
        expensive(runtime.client, options.streams)


def start(client: Client, tenant: str, max_tokens: int, constraint: Spec | None = None, **fields: Any) -> Call:
    session = client.open_session(tenant=tenant)
    session.append("The name of the first person on the list is")
    call = session.generate(sampling_params(max_tokens=max_tokens, temperature=0.0, **fields), constraint)
    session.close()
    return call


def answer(call: Call) -> str:
    try:
        call.result()
    except CallFailed as error:
        return str(error)
    return ""


def first_call(idle_s: float) -> None:
    """One token: free, under the first constraint of a runtime that has been idle, and under two more."""
    with Runtime() as runtime:
        time.sleep(idle_s)
        spent = list[float]()
        schema = JsonSchema({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}})
        for constraint in (None, None, None, Regex("[0-9]{4}"), schema, Regex("[A-Za-z ]{5,30}")):
            begun = time.perf_counter()
            start(runtime.client, "a", 1, constraint).result()
            spent.append(1e3 * (time.perf_counter() - begun))
        free = median(spent[1:3])
        print(
            f"one token: free {free:.0f} ms, first constraint [0-9]{{4}} {spent[3]:.0f} ms, then a schema "
            f"{spent[4]:.0f} ms, then [A-Za-z ]{{5,30}} {spent[5]:.0f} ms"
        )


def slow(number: int) -> JsonSchema:
    return JsonSchema(
        {"oneOf": [{"type": "string", "pattern": f"^.*a.{{{n + number}}}$"} for n in (24, 25, 26)], "$comment": "s"}
    )


def other_tenant(client: Client, count: int) -> None:
    """One tenant has `count` slow schemas waiting; another asks for small ones."""
    waiting = [start(client, "a", 4, slow(number)) for number in range(count)]
    time.sleep(0.5)
    spent = list[float]()
    for number in range(5):
        begun = time.perf_counter()
        answer(start(client, "b", 1, JsonSchema({"type": "integer", "minimum": number})))
        spent.append(1e3 * (time.perf_counter() - begun))
    print(f"small schemas of another tenant behind {count} slow ones: {', '.join(f'{ms:.0f}' for ms in spent)} ms")
    begun = time.perf_counter()
    answers = [answer(call) for call in waiting]
    print(f"  the slow ones were answered after {time.perf_counter() - begun:.1f} s more: {sorted(set(answers))}")


EXTRA_SPECS: dict[str, Any] = {
    "multiple_of": lambda: JsonSchema(
        {"allOf": [{"type": "integer", "multipleOf": n, "minimum": 1, "maximum": 10**15} for n in (9973, 9967, 9949)]}
    ),
    "products": lambda: JsonSchema(
        {"type": "string", "allOf": [{"pattern": f"(a.{{{n}}}b|c.{{{n + 3}}}d)"} for n in range(8, 20)]}
    ),
    "many_properties": lambda: JsonSchema(
        {"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 40}}}x+$"} for i in range(4000)}}
    ),
    "long_pattern": lambda: JsonSchema({"type": "string", "pattern": "|".join(f"w{i}x" for i in range(90_000))}),
    "reference_chain": lambda: JsonSchema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {"type": "integer"}},
        }
    ),
}


def expensive(client: Client, streams: int) -> None:
    """The seconds until each expensive spec is answered while `streams` free texts decode."""
    busy = [start(client, "c", 4000, ignore_eos=True) for _ in range(streams)]
    try:
        for name, make in (EXPENSIVE_SPECS | EXTRA_SPECS).items():
            try:
                spec = make()
            except GrammarError:
                continue  # refused in the client
            busy = [start(client, "c", 4000, ignore_eos=True) if call.done() else call for call in busy]
            begun = time.perf_counter()
            outcome = answer(start(client, "a", 1, spec)) or "compiled"
            spent = time.perf_counter() - begun
            print(f"  {name:18} {1e3 * spent:7.0f} ms  {outcome[:110]}", flush=True)
    finally:
        for call in busy:
            call.abort()


if __name__ == "__main__":
    main()
