"""The host's overhead in a decode step: receiving, batching, model inputs, sampling, commit, replies.

    python benchmarks/step_overhead.py [--weights bf16,as-stored] [--streams 16] [--tokens 96] [--profile]

Reports the median over the steps in which every stream decodes. The engine loop runs in this process; its transport
encodes replies as the one to another process does, and drops them. `--profile` prints the functions with the most time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from plait.runtime.config import engine_config
from plait.runtime.messages import Append, Finished, Generate, Open
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.builder import build_engine_loop
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.transport.frames import encode

CLIENT = b"benchmark"


class InMemoryTransport:
    """Receives from a list; encodes replies and counts finished calls."""

    num_bad_frames, num_clients = 0, 1

    def __init__(self) -> None:
        self.inbox: list[tuple[bytes, Any]] = []
        self.num_ended = 0

    def receive(self, timeout_s: float | None, wake_fds: list[int]) -> list[tuple[bytes, Any]]:
        received, self.inbox = self.inbox, []
        return received

    def take_disconnected(self) -> list[bytes]:
        return []

    def send(self, client: bytes, reply: Any) -> None:
        encode(reply)
        self.num_ended += isinstance(reply, Finished)


class Times:
    """Seconds of named calls within one step, without the time of nested ones."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Replaces a method of an object by one that adds its time to `part`."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.spent[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--weights", default="bf16,as-stored")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for weights in options.weights.split(","):
        measure(weights, options.streams, options.tokens, options.profile)


def measure(weights: str, streams: int, tokens: int, profile: bool) -> None:
    transport = InMemoryTransport()
    config = engine_config(weights=weights, max_batch_rows=max(64, streams), prompt_lookup=False)
    engine_loop = build_engine_loop(config, locate_model(None), transport)
    try:
        begin(engine_loop, transport, streams, tokens)
        if profile:
            profiled(engine_loop, transport, streams)
        else:
            report(weights, streams, timed(engine_loop, transport, streams))
    finally:
        engine_loop.compiler.close()


def begin(engine_loop: EngineLoop, transport: InMemoryTransport, streams: int, tokens: int) -> None:
    """Computes the prompt of every stream, so that all decode from the next step on."""
    sampling = sampling_params(max_tokens=tokens, temperature=0, ignore_eos=True)
    for i in range(streams):
        text = [1, *range(200 + 40 * i, 240 + 40 * i)]
        transport.inbox += [
            (CLIENT, message) for message in (Open(i, program=i), Append(i, text), Generate(i, i, sampling))
        ]
    while not engine_loop.batch_scheduler.running or engine_loop.batch_scheduler.waiting or transport.inbox:
        engine_loop.step(0.0)
    while any(request.num_pending > 1 for request in engine_loop.batch_scheduler.running):
        engine_loop.step(0.0)


def timed(engine_loop: EngineLoop, transport: InMemoryTransport, streams: int) -> list[dict[str, float]]:
    """Returns for each step the seconds of each part; "step" is the total."""
    times, runner = Times(), engine_loop.model_runner
    times.watch(runner.model, "forward", "model")
    times.watch(runner.model, "logits", "model")
    times.watch(runner, "argmax_tokens", "inputs")
    times.watch(runner, "forward", "inputs")
    times.watch(runner, "logits", "inputs")
    times.watch(engine_loop.batch_scheduler, "next_batch", "batch_scheduler")
    times.watch(engine_loop.step_executor._sampler, "sample", "sampler")
    times.watch(engine_loop, "fill_token_mask", "masks")
    times.watch(engine_loop, "receive", "receive")
    times.watch(engine_loop.committer, "commit", "commit")
    times.watch(transport, "send", "replies")
    times.watch(engine_loop, "step", "the rest")
    steps = []
    while not transport.num_ended:
        times.spent.clear()
        start = time.perf_counter()
        engine_loop.step(0.0)
        steps.append({**times.spent, "step": time.perf_counter() - start})
    return steps


def report(weights: str, streams: int, steps: list[dict[str, float]]) -> None:
    medians = {part: statistics.median(step.get(part, 0.0) for step in steps) for part in steps[-1]}
    overhead = statistics.median(1 - step["model"] / step["step"] for step in steps)
    parts = ", ".join(
        f"{part} {1e6 * spent:.0f}"
        for part, spent in sorted(medians.items(), key=lambda item: -item[1])
        if part not in ("step", "model")
    )
    print(
        f"{weights}, {streams} streams: a step {medians['step'] * 1e3:.2f} ms, "
        f"the model {medians['model'] * 1e3:.2f} ms, beside it {overhead:.1%} (us: {parts})",
        flush=True,
    )


def profiled(engine_loop: EngineLoop, transport: InMemoryTransport, streams: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    while not transport.num_ended:
        engine_loop.step(0.0)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
