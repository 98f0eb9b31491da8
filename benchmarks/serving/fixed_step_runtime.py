"""A runtime with a simulated model: the real scheduler, transport and tokenizer, but a step sleeps for a fixed time.

It serves to measure a server and its clients beside a model that takes no CPU time, as on a device. The sampled tokens
spell a fixed text. As a process it serves a directory until its standard input ends; `build` takes any transport.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from plait.constrained import CompilePool
from plait.runtime.batch.batch import Batch
from plait.runtime.config import engine_config
from plait.runtime.executor.step import InFlightStep
from plait.runtime.messages import PROTOCOL, Welcome
from plait.runtime.model_files.locate import locate_model
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.sampler import SamplerOutput
from plait.runtime.scheduler.engine_loop import EngineLoop
from plait.runtime.tokenizer.tokenizer import load_tokenizer
from plait.runtime.transport.zmq_server import ZmqServerTransport

CONTEXT, PAGES, BATCH_TOKENS = 8192, 400_000, 8192
TEXT = " Every strand is laid over the next one, and the rope holds because none of them is asked to do it alone."


class Runner:
    """The attributes of a model runner that the scheduler reads."""

    num_pages, max_batch_tokens, num_saved_reads, adapter_pool = PAGES, BATCH_TOKENS, 0, None


class FixedTimeStep:
    """A step that is already done."""

    is_done, can_overlap = True, False

    def __init__(self, batch: Batch, token_ids: list[int]) -> None:
        self._sampled = SamplerOutput()
        for _, request in batch.sampled_requests:
            self._sampled.tokens[request] = token_ids[len(request.seq) % len(token_ids)]

    def sample(self, mask: TokenMask | None) -> None:
        """Does nothing: the tokens are fixed."""

    def collect(self) -> SamplerOutput:
        return self._sampled


class FixedTimeExecutor:
    """An executor whose steps all take `step_s` seconds."""

    def __init__(self, step_s: float, token_ids: list[int]) -> None:
        self._step_s, self._token_ids = step_s, token_ids

    def launch(self, batch: Batch) -> InFlightStep:
        time.sleep(self._step_s)
        return FixedTimeStep(batch, self._token_ids)

    def launch_overlapped(self, batch: Batch) -> InFlightStep | None:
        return None


def build(transport: Any, step_s: float, rows: int) -> EngineLoop:
    """Returns an engine loop on `transport` with the embedded model's tokenizer."""
    path = locate_model(None)
    tokenizer = load_tokenizer(path)
    vocabulary = tokenizer.vocabulary
    config = engine_config(max_batch_rows=rows, prompt_lookup=False)
    welcome = Welcome(PROTOCOL, str(path), len(vocabulary), CONTEXT, os.getpid())
    runner: Any = Runner()
    sampler: Any = None
    engine_loop = EngineLoop(config, welcome, runner, sampler, vocabulary, CompilePool(vocabulary), transport)
    step_executor: Any = FixedTimeExecutor(step_s, tokenizer.encode_plain(TEXT))
    engine_loop.step_executor = step_executor
    return engine_loop


def main() -> None:
    directory, step_ms, rows = sys.argv[1:]
    transport = ZmqServerTransport(Path(directory), owner_fd=sys.stdin.fileno())
    engine_loop = build(transport, float(step_ms) / 1e3, int(rows))
    print("ready", flush=True)
    while not transport.should_stop:
        engine_loop.step(timeout_s=None)
    transport.close()


if __name__ == "__main__":
    main()
