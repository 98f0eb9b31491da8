"""What `plait serve --replicas` costs and gains: the router with one replica, and the hits of three.

    python benchmarks/replicas.py cost [--streams 32] [--tokens 64] [--rounds 15] [--clock MS]
    python benchmarks/replicas.py hits [--replicas 3] [--contexts 12] [--questions 10]

`cost` puts two servers in front of one runtime, one with a router, and asks them in turn; figures are medians of the
rounds' own ratios and differences. With `--clock` a step takes so many milliseconds and no CPU time.

`hits` asks questions about some texts, in random order, four at a time: of one replica alone, of replicas chosen at
random, and by the router. The figures are the tokens that the engines computed, and those of the simulation in
`cluster.py` with prompts of the same lengths.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cluster import Cluster
from cluster_loads import Job
from serving.http_load import Stream, run, single_ttft
from serving_overhead import Rounds, runtime, server
from simulated_engine import VOCAB

from plait.runtime.client.client import Client
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.replicated_runtime import ReplicatedRuntime

QUESTION_TOKENS = 2  # that differ between the prompts of one text
PROBES = 12  # single requests of a round
WORDS = "The cat sat on the mat and looked at the rain. "  # 12 tokens
PROMPT = WORDS * 40


def cost(options: argparse.Namespace) -> None:
    options.weights = "as-stored"
    with runtime(options) as (address, _), server(address) as (direct, _), server(address, 1) as (routed, _):
        ports, rounds = {"direct": direct, "routed": routed}, Rounds()
        streams = {name: [Stream(port) for _ in range(options.streams)] for name, port in ports.items()}
        for number in range(-1, options.rounds):
            first_ms: dict[str, float] = {}
            wall_s: dict[str, float] = {}
            for name in sorted(ports, reverse=bool(number % 2)):
                probes = [single_ttft(streams[name][0], f"{name} {number}.{i} {PROMPT}") for i in range(PROBES)]
                first_ms[name] = statistics.median(probes) * 1e3
                prompts = [f"Tell me about the number {i} of {name} {number} and " for i in range(options.streams)]
                wall_s[name] = run(streams[name], prompts, options.tokens)["wall_s"]
            if number < 0:  # the first requests compile and allocate
                continue
            rounds.add(**first_ms, difference=first_ms["routed"] - first_ms["direct"])
            rounds.add(throughput=wall_s["direct"] / wall_s["routed"])
    print(
        f"first token of a prompt of about 480 tokens, ms: {rounds.spread('direct')} without a router, "
        f"{rounds.spread('routed')} with: difference {rounds.spread('difference')}\n"
        f"tokens/s of {options.streams} streams with a router, relative to without: "
        f"{rounds.spread('throughput', '.3f')} ({options.rounds} rounds, medians and quartiles)"
    )


def ask(client: Client, prompt: str) -> None:
    session = client.open_session()
    session.append(prompt)
    session.generate(sampling_params(max_tokens=4, temperature=0.0, ignore_eos=True)).result(600)
    session.close()


def hits(options: argparse.Namespace) -> None:
    draw = random.Random(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    replicas = ReplicatedRuntime(None, ["cpu"] * options.replicas, progress=False)
    try:
        clients = [replica.client for replica in replicas.replicas]
        policies: dict[str, Callable[[], Client]] = {
            "one replica": lambda: clients[0],
            "at random": lambda: draw.choice(clients),
            "by the router": lambda: replicas.client,
        }
        expected = 0
        work: dict[str, list[tuple[str, int]]] = {}
        for name, choose in policies.items():
            texts = [f"Report {name} {number}. " + WORDS * 50 for number in range(options.contexts)]
            prompts = [f"{text} Question {number}:" for number in range(options.questions) for text in texts]
            draw.shuffle(prompts)
            before, start = [client.status().computed_tokens for client in clients], time.perf_counter()
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda prompt, choose=choose: ask(choose(), prompt), prompts))
            seconds = time.perf_counter() - start
            computed = [client.status().computed_tokens - old for client, old in zip(clients, before, strict=True)]
            expected = expected or sum(computed)
            lengths = [len(replicas.client.tokenizer.encode_plain(prompt)) for prompt in prompts]
            work[name] = [(prompt.partition(".")[0], length) for prompt, length in zip(prompts, lengths, strict=True)]
            print(
                f"{name:14} {len(prompts)} requests, computed {sum(computed):6} tokens "
                f"({sum(computed) / expected:.3f} of one replica), by replica {computed}, {seconds:.1f} s",
                flush=True,
            )
    finally:
        replicas.shutdown()
    for name, policy, count in (("one replica", "tree", 1), ("at random", "random", 3), ("by the router", "tree", 3)):
        computed = simulated(work[name], policy, options.replicas if count > 1 else 1)
        print(f"{name:14} simulated: computed {computed:6} tokens ({computed / expected:.3f} of one replica)")


def simulated(work: list[tuple[str, int]], policy: str, num_replicas: int) -> int:
    """Returns the tokens computed for the same work in the simulation of `cluster.py`. work: (text, tokens) each."""
    numbers = np.random.default_rng(1)
    texts = {text: numbers.integers(2, VOCAB, 2048, dtype=np.int32) for text, _ in work}
    jobs = []
    for number, (text, length) in enumerate(work):
        question = numbers.integers(2, VOCAB, QUESTION_TOKENS, dtype=np.int32)
        prompt = np.concatenate([texts[text][: length - QUESTION_TOKENS], question])
        jobs.append(Job(0.01 * number, prompt, 4))
    cluster = Cluster(policy, num_replicas)
    cluster.run(jobs)
    return sum(replica.loop.num_computed_tokens for replica in cluster.replicas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["cost", "hits"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", type=float, default=0.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--contexts", type=int, default=12)
    parser.add_argument("--questions", type=int, default=10)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} processors")
    {"cost": cost, "hits": hits}[options.what](options)


if __name__ == "__main__":
    main()
