"""What a batch on a Ray cluster costs, against `run_batch` in one process: its start, and each item.

    python benchmarks/ray_batches.py [--items 64] [--tokens 16] [--actors 1,2]

Ray runs on this machine, on loopback. The program has no call in one measurement, which leaves the cost of an item
itself: scheduling, sending it, and its state coming back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import plait
from plait import gen
from plait.runtime.cluster.ray_package import import_ray, on_loopback

ROUNDS = 5
EMPTY_ITEMS = 1000


@plait.function
def story(s: Any, number: int, tokens: int) -> None:
    s += f"{number}. A story about a cat:" + gen("story", max_tokens=tokens, ignore_eos=True)


@plait.function
def nothing(s: Any, number: int, tokens: int) -> None:
    s += f"{number}"


def median_s(program: plait.Program[Any], items: list[dict[str, int]], backend: Any, rounds: int = ROUNDS) -> float:
    """The median of the seconds that a batch takes."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        states = program.run_batch(items, backend=backend)
        times.append(time.perf_counter() - began)
        assert not any(state.error() for state in states)
    return statistics.median(times)


def resident_mb(pattern: str) -> list[int]:
    """The resident memory of processes whose command line has the pattern, in MB."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        if pattern in " ".join(process.info["cmdline"] or []):
            found.append(process.info["memory_info"].rss >> 20)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--actors", default="1,2")
    options = parser.parse_args()
    items = [{"number": number, "tokens": options.tokens} for number in range(options.items)]
    empty = [{"number": number, "tokens": 0} for number in range(EMPTY_ITEMS)]
    print(f"Ray's start, one actor and one item: {median_s(story, items[:1], plait.Cluster('local'), rounds=1):.1f} s")
    with plait.Runtime(progress=False) as runtime:
        median_s(story, items, runtime, rounds=1)
        local, each = median_s(story, items, runtime), median_s(nothing, empty, runtime) / EMPTY_ITEMS
    print(f"one process: {local:.2f} s for {len(items)} items; an item without calls {each * 1000:.2f} ms")
    ray = import_ray("this benchmark")
    with on_loopback(ray):
        ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, logging_level="error")
    for actors in map(int, options.actors.split(",")):
        cluster = plait.Cluster(actors=actors)
        start = median_s(nothing, empty[:actors], cluster)
        whole = median_s(story, items, cluster) - start
        each = (median_s(nothing, empty, cluster) - start) / EMPTY_ITEMS
        text = f"{actors} actors: start {start:.1f} s, then {whole:.2f} s for {len(items)} items"
        print(f"{text}; an item without calls {each * 1000:.2f} ms")
    print(f"memory of Ray's own processes: {sum(resident_mb('raylet/raylet') + resident_mb('gcs_server'))} MB")
    ray.shutdown()


if __name__ == "__main__":
    main()
