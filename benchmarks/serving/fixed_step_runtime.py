"""A runtime whose model is a clock: the real scheduler, link and tokenizer; a step sleeps and its tokens spell a text.

So what a server and a client cost can be measured beside a model that takes no processor from them, as one on a
device does. Run as a process it serves a directory until its standard input ends; `build` puts it on any link.

Knows: the parts of a scheduler. Must not know: who asks it.
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
    """What the scheduler asks of a model runner beside computing."""

    num_pages, max_batch_tokens = PAGES, BATCH_TOKENS


class FixedTimeStep:
    """A step that is over."""

    is_done, can_overlap = True, False

    def __init__(self, batch: Batch, token_ids: list[int]) -> None:
        self._sampled = SamplerOutput()
        for _, request in batch.sampled_requests:
            self._sampled.tokens[request] = token_ids[len(request.seq) % len(token_ids)]

    def sample(self, mask: TokenMask | None) -> None:
        """The clock's tokens are what they are."""

    def collect(self) -> SamplerOutput:
        return self._sampled


class FixedTimeExecutor:
    """A step takes `step_s` seconds, whatever is in it."""

    def __init__(self, step_s: float, token_ids: list[int]) -> None:
        self._step_s, self._token_ids = step_s, token_ids

    def launch(self, batch: Batch) -> InFlightStep:
        time.sleep(self._step_s)
        return FixedTimeStep(batch, self._token_ids)

    def launch_overlapped(self, batch: Batch) -> InFlightStep | None:
        return None


def build(transport: Any, step_s: float, rows: int) -> EngineLoop:
    """A scheduler on `transport` with the embedded model's tokenizer."""
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
