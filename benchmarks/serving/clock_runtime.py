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
from plait.runtime.config import engine_config
from plait.runtime.flight import Flight
from plait.runtime.link import ZmqLink
from plait.runtime.messages import PROTOCOL, Welcome
from plait.runtime.models.locate import locate_model
from plait.runtime.sampler import Mask, Sampled
from plait.runtime.scheduler.rows import Batch
from plait.runtime.scheduler.scheduler import Scheduler
from plait.runtime.tokenizer.tokenizer import load_tokenizer

CONTEXT, PAGES, BATCH_TOKENS = 8192, 400_000, 8192
TEXT = " Every strand is laid over the next one, and the rope holds because none of them is asked to do it alone."


class Runner:
    """What the scheduler asks of a model runner beside computing."""

    num_pages, max_batch_tokens = PAGES, BATCH_TOKENS


class ClockFlight:
    """A step that is over."""

    is_done, can_be_followed = True, False

    def __init__(self, batch: Batch, token_ids: list[int]) -> None:
        self._sampled = Sampled()
        for _, row in batch.sampled:
            self._sampled.tokens[row] = token_ids[len(row.seq) % len(token_ids)]

    def sample(self, mask: Mask | None) -> None:
        """The clock's tokens are what they are."""

    def collect(self) -> Sampled:
        return self._sampled


class ClockLauncher:
    """A step takes `step_s` seconds, whatever is in it."""

    def __init__(self, step_s: float, token_ids: list[int]) -> None:
        self._step_s, self._token_ids = step_s, token_ids

    def launch(self, batch: Batch) -> Flight:
        time.sleep(self._step_s)
        return ClockFlight(batch, self._token_ids)

    def follow(self, batch: Batch) -> Flight | None:
        return None


def build(link: Any, step_s: float, rows: int) -> Scheduler:
    """A scheduler on `link` with the embedded model's tokenizer."""
    path = locate_model(None)
    tokenizer = load_tokenizer(path)
    vocabulary = tokenizer.vocabulary
    config = engine_config(max_batch_rows=rows, prompt_lookup=False)
    welcome = Welcome(PROTOCOL, str(path), len(vocabulary), CONTEXT, os.getpid())
    runner: Any = Runner()
    sampler: Any = None
    scheduler = Scheduler(config, welcome, runner, sampler, vocabulary, CompilePool(vocabulary), link)
    launcher: Any = ClockLauncher(step_s, tokenizer.encode_plain(TEXT))
    scheduler.launcher = launcher
    return scheduler


def main() -> None:
    directory, step_ms, rows = sys.argv[1:]
    link = ZmqLink(Path(directory), owner_fd=sys.stdin.fileno())
    scheduler = build(link, float(step_ms) / 1e3, int(rows))
    print("ready", flush=True)
    while not link.should_end:
        scheduler.step(timeout_s=None)
    link.close()


if __name__ == "__main__":
    main()
