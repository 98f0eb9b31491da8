"""Measures the start of a runtime and the gaps between the tokens of its first seconds.

    python benchmarks/first_seconds.py [--model FILE] [--seconds 10] [--rounds 3] [--wait 0] [--constraint] [--warm]

A runtime starts, and one stream after the other is read from it for `--seconds`, beginning `--wait` seconds after it is
ready. Printed are the seconds to ready and to the first token, the processor seconds of both processes, the median
gap, the 99.9th percentile over the median, and the longest gap with its time. `--constraint`: a constrained call begins
beside the second stream. `--warm`: with `warm_constraints`, as servers start. A second round finds kernels and packed
weights on disk. Run it with nothing else on the machine: another process causes gaps of its own.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from itertools import pairwise

import plait
from plait import gen

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-f]{3,9}x$"}}}


@plait.function
def story(s):
    s += "Once upon a time" + gen("text", max_tokens=100, ignore_eos=True)


@plait.function
def named(s):
    s += "In JSON: " + gen("value", json_schema=SCHEMA, max_tokens=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a GGUF file or a folder; the embedded model if none is named")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=0.0, help="seconds without a call after the start")
    parser.add_argument("--constraint", action="store_true", help="a constrained call beside the streams")
    parser.add_argument("--warm", action="store_true", help="warm_constraints=True")
    options = parser.parse_args()
    print("| ready | first token | processor | median gap | p99.9 / median | longest gap |")
    print("| --- | --- | --- | --- | --- | --- |")
    for _ in range(options.rounds):
        print(measure_start(options), flush=True)


def measure_start(options: argparse.Namespace) -> str:
    """Starts a runtime and returns a row of the table."""
    began, cpu_before = time.perf_counter(), processor_s()
    with plait.Runtime(options.model, progress=False, warm_constraints=options.warm) as runtime:
        ready = time.perf_counter()
        time.sleep(options.wait)
        first_called = time.perf_counter()
        arrivals: list[list[float]] = []
        constrained = None
        while time.perf_counter() < first_called + options.seconds:
            stream = story.run(backend=runtime, stream=True, temperature=1.0)
            arrivals.append([time.perf_counter() for _ in stream.text_iter("text")])
            if options.constraint and constrained is None:
                constrained = named.run(backend=runtime, stream=True)
    cpu_s = processor_s() - cpu_before
    gaps = sorted((b - a, a - ready) for times in arrivals for a, b in pairwise(times))
    median = statistics.median(gap for gap, _ in gaps)
    high, (longest, at) = gaps[int(0.999 * len(gaps))][0], gaps[-1]
    first_s = arrivals[0][0] - first_called + ready - began
    return (
        f"| {ready - began:.2f} s | {first_s:.2f} s | {cpu_s:.1f} s | {1000 * median:.1f} ms | {high / median:.1f} "
        f"| {1000 * longest:.0f} ms, {at:.1f} s after ready |"
    )


def processor_s() -> float:
    """Returns the processor seconds of this process and of those that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
