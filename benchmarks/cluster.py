"""Replicas behind a router, simulated: the real engine loop and the real router over a clock that stands for the model.

    python benchmarks/cluster.py [--replicas 8] [--seconds 30] [--loads chats agents documents] [--policies ...]

A step costs what Llama-3.1-8B in bfloat16 costs on an H100 SXM. From the sizes of the model (8.03e9 parameters, 32
layers, hidden size 4096, 8 KV heads of 128) and the data sheet (3.35 TB/s, 989 TFLOP/s dense), at 80% of the bandwidth
and 55% of the arithmetic, which well-tuned engines reach:

    weights     16.06 GB / 2.68 TB/s                     6.0 ms a step, or
    arithmetic  16.06 GFLOP / 544 TFLOP/s                29.5 us a token, whichever is longer; added to it
    KV read     131,072 bytes / 2.68 TB/s                49 ns for each cached token of each row
    attention   4 * 32 * 4096 FLOP / 544 TFLOP/s         0.96 ns for each pair of prompt token and earlier token
    host        1 ms a step
    KV pool     80 GB * 0.9 - 16 GB - 4 GB = 52 GB       396,000 tokens

Policies: `random`; `load` (least prompt and output tokens placed and not over); `tree` (the router); and the tree with
faulty events: `late` (2 s), `lost` (30% of messages), `wrong` (20% of the hashes of a batch replaced by others).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from cluster_loads import LOADS, Job
from simulated_engine import VOCAB, Clock, OneTokenModel

from plait.constrained import CompilePool, Vocabulary
from plait.runtime.arrays import Float32Array, IntArray
from plait.runtime.batch import request_metrics
from plait.runtime.cluster.router import Placement, Router
from plait.runtime.config import engine_config
from plait.runtime.kv_cache.block_events import HEARTBEAT_S, BlockEvents, block_hashes, namespace_hash
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.messages import (
    PROTOCOL,
    Append,
    BlockBatch,
    Close,
    Failed,
    Finished,
    Generate,
    Open,
    Tokens,
    Welcome,
)
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.scheduler.policy import batching

WEIGHTS_S, TOKEN_S, KV_READ_S, ATTENTION_S, HOST_S = 6.0e-3, 29.5e-6, 49e-9, 0.96e-9, 1e-3
PAGES, MAX_BATCH_TOKENS, MAX_ROWS, CONTEXT = 396_000, 8192, 64, 32_768
EVENTS_S, CHECK_S, NETWORK_S = 0.05, 0.05, 0.0005
POLICIES = ("random", "load", "tree", "late", "lost", "wrong")
CLIENT = b"simulated"


@dataclass
class Model(OneTokenModel):
    """A model runner that gives every token the same logits and advances the clock."""

    clock: Clock
    num_pages: int = PAGES
    max_batch_tokens: int = MAX_BATCH_TOKENS
    num_saved_reads: int = 0
    adapter_pool: None = None
    busy_s: float = 0.0

    def forward(self, batch: Any) -> Float32Array:
        count = sum(row.count for row in batch.rows)
        num_read = sum(row.start for row in batch.rows)
        num_pairs = sum(row.count * (row.start + row.count / 2) for row in batch.rows if row.count > 1)
        cost = max(WEIGHTS_S, TOKEN_S * count) + KV_READ_S * num_read + ATTENTION_S * num_pairs + HOST_S
        self.clock.now += cost
        self.busy_s += cost
        return np.zeros((batch.num_logits, 1), np.float32)


@dataclass
class Call:
    """A job on its way."""

    job: Job
    text: IntArray
    arrived: float
    replica: int
    placement: Placement | None
    first_token: float = 0.0


@dataclass
class Replica:
    """One engine loop with its inbox."""

    number: int
    cluster: Cluster
    num_bad_frames: int = 0
    num_clients: int = 1
    inbox: list[Any] = field(default_factory=list)
    is_scheduled: bool = False
    load: int = 0  # as the policy `load` counts it
    num_placed_tokens: int = 0

    def __post_init__(self) -> None:
        clock, vocabulary = self.cluster.clock, self.cluster.vocabulary
        self.model = Model(clock)
        config = engine_config(max_batch_rows=MAX_ROWS, prompt_lookup=False)
        welcome = Welcome(PROTOCOL, "", VOCAB, CONTEXT, 0)
        self.loop = EngineLoop(config, welcome, self.model, Sampler(), vocabulary, self.cluster.compiler, self)  # type: ignore[arg-type]
        self.events = BlockEvents(self.loop.cache.tree, epoch=1)
        self.last_sent = 0.0

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, Any]]:
        messages, self.inbox = [(CLIENT, message) for message in self.inbox], []
        return messages

    def take_disconnected(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: Any) -> None:
        if isinstance(reply, Failed):
            raise RuntimeError(f"a call failed: {reply.text}")
        if isinstance(reply, Finished):
            self.cluster.at(self.cluster.clock.now, self.cluster.finish, reply.call)
        elif isinstance(reply, Tokens):
            self.cluster.first_token(reply.call)


class Cluster:
    """Replicas, a router and the jobs, driven in the order of simulated time."""

    def __init__(self, policy: str, num_replicas: int, seed: int = 1) -> None:
        self.policy, self.clock, self.draw = policy, Clock(), random.Random(seed)
        batching.time = request_metrics.time = SimpleNamespace(monotonic=self.clock.monotonic)  # type: ignore[assignment]
        self.vocabulary = Vocabulary(tuple(b"%d " % i for i in range(VOCAB)), (0,), lambda text: [])
        self.compiler = CompilePool(self.vocabulary)
        self.replicas = [Replica(number, self) for number in range(num_replicas)]
        self.router = Router()
        for _ in self.replicas:
            self.router.add_replica(0.0)
        self.root = namespace_hash(CacheNamespace())
        self.count, self.due = itertools.count(1), []  # type: tuple[Any, list[tuple[float, int, Any, Any]]]
        self.calls: dict[int, Call] = {}
        self.ended: list[tuple[float, float, float, int]] = []  # arrival, seconds to first token, end, output tokens
        self.num_left, self.choice_s = 0, []  # type: tuple[int, list[float]]

    def at(self, when: float, action: Any, argument: Any) -> None:
        heapq.heappush(self.due, (when, next(self.count), action, argument))

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.num_left += sum(1 for _ in job.tree())
            self.at(job.start_s, self.arrive, (job, job.prompt))
        if self.policy not in ("random", "load"):
            self.at(CHECK_S, self.check, None)
        while self.num_left:
            when, _, action, argument = heapq.heappop(self.due)
            self.clock.now = when
            action(argument)

    # -- jobs -----------------------------------------------------------------------------------------

    def arrive(self, arrival: tuple[Job, IntArray]) -> None:
        job, text = arrival
        number, placement = self.choose(job, text)
        call = next(self.count)
        self.calls[call] = Call(job, text, self.clock.now, number, placement)
        replica = self.replicas[number]
        replica.load += len(text) + 4 * job.num_output
        replica.num_placed_tokens += len(text) + job.num_output
        sampling = sampling_params(max_tokens=job.num_output, temperature=0, ignore_eos=True)
        pieces = [text[start : start + 16_384].tolist() for start in range(0, len(text), 16_384)]
        replica.inbox += [Open(call), *(Append(call, piece) for piece in pieces), Generate(call, call, sampling)]
        replica.inbox.append(Close(call))
        self.wake(replica)

    def choose(self, job: Job, text: IntArray) -> tuple[int, Placement | None]:
        if self.policy == "random":
            return self.draw.randrange(len(self.replicas)), None
        if self.policy == "load":
            return min(self.replicas, key=lambda replica: (replica.load, replica.num_placed_tokens)).number, None
        blocks = block_hashes(text, self.root)
        start = time.perf_counter()
        placement = self.router.place(blocks, len(text), job.num_output, self.clock.now)
        self.choice_s.append(time.perf_counter() - start)
        return placement.replica, placement

    def first_token(self, call_id: int) -> None:
        call = self.calls[call_id]
        if not call.first_token:
            call.first_token = self.clock.now - call.arrived
            if call.placement is not None:
                self.at(self.clock.now, self.router.first_token, call.placement)

    def finish(self, call_id: int) -> None:
        call = self.calls.pop(call_id)
        job = call.job
        self.num_left -= 1
        self.replicas[call.replica].load -= len(call.text) + 4 * job.num_output
        if call.placement is not None:
            self.router.finish(call.placement, job.num_output, self.clock.now)
        self.ended.append((call.arrived, call.first_token, self.clock.now, job.num_output))
        text = np.concatenate([call.text, np.ones(job.num_output, np.int32)]) if job.after else call.text
        for after in job.after:
            self.at(self.clock.now + after.start_s, self.arrive, (after, np.concatenate([text, after.prompt])))

    # -- replicas -------------------------------------------------------------------------------------

    def wake(self, replica: Replica) -> None:
        if not replica.is_scheduled:
            replica.is_scheduled = True
            self.at(self.clock.now, self.step, replica)

    def step(self, replica: Replica) -> None:
        replica.is_scheduled = False
        replica.loop.step(0.0)
        if replica.loop.has_work or replica.inbox:
            self.wake(replica)

    # -- events ---------------------------------------------------------------------------------------

    def check(self, _: None) -> None:
        now = self.clock.now
        for replica in self.replicas:
            if replica.events.num_pending or now >= replica.last_sent + HEARTBEAT_S:
                replica.last_sent = now
                self.send_events(replica, replica.events.take_batch())
        for number in self.router.replicas_to_ask(now):
            self.replicas[number].events.take_batch()
            self.send_events(self.replicas[number], self.replicas[number].events.snapshot())
        self.at(now + CHECK_S, self.check, None)

    def send_events(self, replica: Replica, message: Any) -> None:
        if self.policy == "lost" and self.draw.random() < 0.3:
            return
        if self.policy == "wrong" and isinstance(message, BlockBatch):
            added = [block if self.draw.random() > 0.2 else self.draw.getrandbits(64) for block in message.added]
            message = BlockBatch(message.epoch, message.sequence, added, message.removed)
        delay = 2.0 if self.policy == "late" else NETWORK_S
        self.at(self.clock.now + delay, self.deliver, (replica.number, message))

    def deliver(self, delivery: tuple[int, Any]) -> None:
        self.router.receive(*delivery, self.clock.now)


def report(name: str, cluster: Cluster, wall_s: float) -> None:
    """Prints one line of figures."""
    last = max(end for _, _, end, _ in cluster.ended)
    first_tokens = sorted(first for _, first, _, _ in cluster.ended)
    busy = [replica.model.busy_s for replica in cluster.replicas]
    computed = sum(replica.loop.num_computed_tokens for replica in cluster.replicas)
    choices = sorted(cluster.choice_s)
    p50_s, p90_s = statistics.median(first_tokens), first_tokens[int(0.9 * len(first_tokens))]
    print(
        f"{name:9} {cluster.policy:6} {len(cluster.ended):6} requests, "
        f"{sum(row[3] for row in cluster.ended) / last:8.0f} output tokens/s, "
        f"first token p50 {p50_s:7.3f} p90 {p90_s:7.3f} s, "
        f"computed {computed / 1e6:6.2f} M tokens, busiest {max(busy) / statistics.mean(busy):4.2f} x the mean"
        + (f", choice p50 {1e6 * statistics.median(choices):3.0f} us" if choices else "")
        + f" ({wall_s:.0f} s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--rate", type=float, help="requests/s for each replica, instead of the load's own")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    options = parser.parse_args()
    for name in options.loads:
        make_jobs, rate = LOADS[name]
        for policy in options.policies:
            jobs = make_jobs(options.seconds, (options.rate or rate) * options.replicas, 1)
            start, cluster = time.perf_counter(), Cluster(policy, options.replicas)
            cluster.run(jobs)
            report(name, cluster, time.perf_counter() - start)


if __name__ == "__main__":
    main()
