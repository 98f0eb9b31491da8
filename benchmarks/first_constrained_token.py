"""The first token of a runtime's first call, free and under a constraint.

    python benchmarks/first_constrained_token.py [--runtimes 3] [--idle-s 0 3]

Each figure is the median over fresh runtimes, whose only call asks for one token. `--idle-s`: seconds from when the
runtime is ready to the call.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

from plait.constrained import JsonSchema, Regex, Spec
from plait.runtime.process.runtime import Runtime
from plait.runtime.sampling_params import sampling_params

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CONSTRAINTS: dict[str, Spec | None] = {
    "free": None,
    "`[A-Za-z ]{5,30}`": Regex("[A-Za-z ]{5,30}"),
    "an object with a string and an integer": JsonSchema(OBJECT),
}


def first_token_ms(constraint: Spec | None, idle_s: float) -> float:
    """Starts a runtime. Returns the milliseconds from its first call to the end of it."""
    with Runtime(progress=False) as runtime:
        time.sleep(idle_s)
        session = runtime.client.open_session()
        session.append("The name of the first person on the list is")
        begun = time.perf_counter()
        session.generate(sampling_params(max_tokens=1, temperature=0.0), constraint).result()
        return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", type=int, default=3, help="fresh runtimes for each figure")
    parser.add_argument("--idle-s", type=float, nargs="*", default=[0.0, 3.0])
    options = parser.parse_args()
    print(f"| seconds after the start | {' | '.join(CONSTRAINTS)} |\n|---|{'---|' * len(CONSTRAINTS)}")
    for idle_s in options.idle_s:
        rounds = [
            [first_token_ms(constraint, idle_s) for constraint in CONSTRAINTS.values()] for _ in range(options.runtimes)
        ]  # in turns, as the machine changes
        cells = (f"{median(spent):.0f} ms" for spent in zip(*rounds, strict=True))
        print(f"| {idle_s:g} | {' | '.join(cells)} |", flush=True)
    print(f"\nLoad when it ended: {os.getloadavg()[0]:.1f}; medians of {options.runtimes} fresh runtimes.")


if __name__ == "__main__":
    main()
