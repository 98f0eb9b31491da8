"""What placing costs: a choice among 64 replicas and a million blocks, and the replica's events.

    python benchmarks/router.py [--replicas 64] [--blocks 1000000]

The replicas hold prompts of 94 blocks (6,016 tokens) at random, some of them shared by several replicas.
"""

from __future__ import annotations

import argparse
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

from plait.runtime.cluster.router import Router
from plait.runtime.kv_cache.block_events import BLOCK_TOKENS, BlockEvents, block_hashes, namespace_hash
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import BlockBatch

PROMPT_BLOCKS = 94
ROOT = namespace_hash(("", ""))


def fill(router: Router, num_replicas: int, num_blocks: int, draw: random.Random) -> list[list[int]]:
    """Gives the replicas prompts until the table has `num_blocks` blocks; returns the prompts."""
    prompts = []
    batches: dict[int, list[int]] = {router.add_replica(0.0): [] for _ in range(num_replicas)}
    while len(prompts) * PROMPT_BLOCKS < num_blocks:
        prompt = [draw.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
        prompts.append(prompt)
        for _ in range(draw.choice([1, 1, 1, 2, 8])):
            batches[draw.randrange(num_replicas)] += prompt
    for replica, added in batches.items():
        router.receive(replica, BlockBatch(1, 1, added, []), 0.0)
    return prompts


def quantiles(name: str, seconds: list[float]) -> None:
    seconds.sort()
    p50, p99 = statistics.median(seconds), seconds[int(0.99 * len(seconds))]
    print(f"{name:58} p50 {1e6 * p50:7.1f} us, p99 {1e6 * p99:7.1f} us", flush=True)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def choices(num_replicas: int, num_blocks: int) -> None:
    draw, router = random.Random(1), Router()
    prompts = fill(router, num_replicas, num_blocks, draw)
    print(f"{len(router.index)} blocks, {num_replicas} replicas, peak memory of the process {_peak_mb()} MB")
    cases = {
        "choice, the prompt is cached": lambda: draw.choice(prompts),
        "choice, two thirds are cached": lambda: draw.choice(prompts)[:62] + [draw.getrandbits(64) for _ in range(32)],
        "choice, nothing is cached": lambda: [draw.getrandbits(64) for _ in range(PROMPT_BLOCKS)],
    }
    for name, prompt in cases.items():
        seconds, placements = [], []
        for number in range(5000):
            blocks, now = prompt(), number * 1e-3
            start = time.perf_counter()
            placements.append(router.place(blocks, 6016, 200, now))
            seconds.append(time.perf_counter() - start)
            if len(placements) > 1000:
                router.finish(placements.pop(0), 200, now)
        for placement in placements:
            router.finish(placement, 200, 5.0)
        router.replicas_to_ask(100.0)
        quantiles(name, seconds)
    tokens = np.arange(PROMPT_BLOCKS * BLOCK_TOKENS, dtype=np.int32)
    quantiles("hashing a prompt of 6,016 tokens", [timed(lambda: block_hashes(tokens, ROOT)) for _ in range(2000)])
    batch = [draw.getrandbits(64) for _ in range(128)]
    router.index.remove_replica(0)
    router.index.add_replica(0)
    quantiles("applying a batch of 128 blocks", [timed(lambda: router.index.change(0, batch, ())) for _ in range(2000)])
    everything = [block for prompt in prompts[:166] for block in prompt]
    quantiles("applying a snapshot of 15,604", [timed(lambda: router.index.replace(0, everything)) for _ in range(50)])


def emission() -> None:
    """The time of what the cache does for requests, with and without events, alternating."""
    numbers = np.random.default_rng(1)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(200):
        prompt = numbers.integers(0, 100_000, 8192, dtype=np.int32)
        for with_events in (False, True):
            cache = PrefixCache(10_000)
            if with_events:
                BlockEvents(cache.tree)
            seq = Sequence(("", ""), prompt)
            cache.activate(seq, len(prompt))
            cache.allocate(seq, len(prompt))
            seconds.setdefault(("publishing a prompt of 8,192 tokens", with_events), []).append(
                timed(lambda seq=seq, cache=cache: cache.publish(seq))
            )

            def decode(seq: Sequence = seq, cache: PrefixCache = cache) -> None:
                seq.tokens.append(7)
                cache.allocate(seq, 1)

            seconds.setdefault(("cache work of one decoded token", with_events), []).append(
                statistics.fmean(timed(decode) for _ in range(256))
            )
            seconds.setdefault(("ending a call of 256 output tokens", with_events), []).append(
                timed(lambda seq=seq, cache=cache: cache.free(seq))
            )
            seconds.setdefault(("evicting all of it", with_events), []).append(timed(cache.flush))
    for (name, with_events), values in seconds.items():
        quantiles(f"{name}, {'with' if with_events else 'without'} events", values)


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}")
    choices(options.replicas, options.blocks)
    emission()


if __name__ == "__main__":
    main()
