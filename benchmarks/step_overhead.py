"""The host's overhead in a decode step: receiving, batching, model inputs, sampling, commit, replies.

    python benchmarks/step_overhead.py [--weights bf16,as-stored] [--streams 16] [--tokens 96] [--profile]

Reports the median over the steps in which every stream decodes. The engine loop runs in this process; its transport
encodes replies as the one to another process does, and drops them. `--profile` prints the functions with the most time.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from typing import Any

from common.options import parsed

from plait.runtime.config import engine_config
from plait.runtime.messages import Append, Finished, Generate, Open
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.builder import build_engine_loop
from plait.runtime.sampling_params import sampling_params
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.transport.frames import encode


class InMemoryTransport:
    """Receives from a list; encodes replies and counts finished calls."""

    num_bad_frames, num_clients, num_ended = 0, 1, 0

    def __init__(self) -> None:
        self.inbox: list[tuple[bytes, Any]] = []

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
        method = getattr(owner, name)

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
    options = parsed(__doc__, weights="bf16,as-stored", streams=16, tokens=96, profile=False)
    for weights in options.weights.split(","):
        transport, streams = InMemoryTransport(), options.streams
        config = engine_config(weights=weights, max_batch_rows=max(64, streams), prompt_lookup=False)
        engine_loop = build_engine_loop(config, locate_model(None), transport)
        try:
            begin(engine_loop, transport, streams, options.tokens)
            if options.profile:
                profiled(engine_loop, transport)
            else:
                report(f"{weights}, {streams} streams", timed(engine_loop, transport))
        finally:
            engine_loop.compiler.close()


def begin(engine_loop: EngineLoop, transport: InMemoryTransport, streams: int, tokens: int) -> None:
    """Computes the prompt of every stream, so that all decode from the next step on."""
    sampling = sampling_params(max_tokens=tokens, temperature=0, ignore_eos=True)
    for i in range(streams):
        messages = Open(i, program=i), Append(i, [1, *range(200 + 40 * i, 240 + 40 * i)]), Generate(i, i, sampling)
        transport.inbox += [(b"benchmark", message) for message in messages]
    scheduler = engine_loop.batch_scheduler
    while len(scheduler.running) < streams or any(request.num_pending > 1 for request in scheduler.running):
        engine_loop.step(0.0)


def timed(engine_loop: EngineLoop, transport: InMemoryTransport) -> list[dict[str, float]]:
    """Returns for each step the seconds of each part; "step" is the total."""
    times, runner = Times(), engine_loop.model_runner
    for owner, name, part in (
        (runner.model, "forward", "model"),
        (runner.model, "logits", "model"),
        (runner, "argmax_tokens", "inputs"),
        (runner, "forward", "inputs"),
        (runner, "logits", "inputs"),
        (engine_loop.batch_scheduler, "next_batch", "batch_scheduler"),
        (engine_loop.step_executor._sampler, "sample", "sampler"),
        (engine_loop, "fill_token_mask", "masks"),
        (engine_loop, "receive", "receive"),
        (engine_loop.committer, "commit", "commit"),
        (transport, "send", "replies"),
        (engine_loop, "step", "the rest"),
    ):
        times.watch(owner, name, part)
    steps = []
    while not transport.num_ended:
        times.spent.clear()
        start = time.perf_counter()
        engine_loop.step(0.0)
        steps.append({**times.spent, "step": time.perf_counter() - start})
    return steps


def report(name: str, steps: list[dict[str, float]]) -> None:
    medians = {part: statistics.median(step.get(part, 0.0) for step in steps) for part in steps[-1]}
    overhead = statistics.median(1 - step["model"] / step["step"] for step in steps)
    step_ms, model_ms = 1e3 * medians.pop("step"), 1e3 * medians.pop("model")
    parts = (f"{part} {1e6 * spent:.0f}" for part, spent in sorted(medians.items(), key=lambda item: -item[1]))
    beside = f"beside it {overhead:.1%} (us: {', '.join(parts)})"
    print(f"{name}: a step {step_ms:.2f} ms, the model {model_ms:.2f} ms, {beside}", flush=True)


def profiled(engine_loop: EngineLoop, transport: InMemoryTransport) -> None:
    with cProfile.Profile() as profile:
        while not transport.num_ended:
            engine_loop.step(0.0)
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
