"""A simulated device that executes its queue late: when the host waits for it, or at random times.

Queued work reads host buffers, sampled tokens and KV pages only when it is executed. A copy to the host completes at
another, later time; until then its target holds garbage. So code that refills or reads a buffer too early, overwrites
tokens that are still to be read, or uses results without waiting gets wrong tokens.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from recorded_graphs import GraphPool
from synchronous_stream import ImmediateStream

GARBAGE = -1_000_000


class DelayedEvent:
    """Complete when the stream has executed `place` pieces of work and, if given, the copy."""

    def __init__(self, stream: DelayedStream, place: int, copy=None) -> None:
        self._stream, self._place, self._copy = stream, place, copy

    @property
    def is_complete(self) -> bool:
        self._stream.maybe_progress()
        return self._stream.num_done >= self._place and self._copy not in self._stream.copies

    def wait(self) -> None:
        if not self.is_complete:
            self._stream.num_waits += 1
        self._stream.run_until(self._place)
        if self._copy in self._stream.copies:
            self._stream.finish_copy(self._copy)


class DelayedStream:
    """A Stream. `progress_probability` of executing work at an opportunity; 0.0: only in waits.

    Captures in pieces are recorded, unless `records` is False, as interpreted Triton kernels need: then they run again.
    """

    def __init__(self, progress_probability: float, seed: int = 0, records: bool = True) -> None:
        self.device = torch.device("cpu")
        self.num_enqueued = self.num_done = self.num_waits = 0
        self.graph_pool = GraphPool() if records else ImmediateStream(self.device)
        self.copies = []  # to the host: (place in the queue, source, target)
        self._queue, self._progress_probability, self._random = (
            deque(),
            progress_probability,
            np.random.default_rng(seed),
        )

    # -- the interface of Stream

    def enqueue(self, work) -> None:
        self._queue.append(work)
        self.num_enqueued += 1
        self.maybe_progress()

    def capture(self, work):
        self.run_until(self.num_enqueued)
        with torch.inference_mode():
            work()
        return work

    def capture_pieces(self, work):
        self.run_until(self.num_enqueued)
        with torch.inference_mode():
            return self.graph_pool.capture_pieces(work)

    def record_event(self) -> DelayedEvent:
        return DelayedEvent(self, self.num_enqueued)

    def copy_to_host(self, source, target) -> DelayedEvent:
        target.fill_(GARBAGE)
        copy = (self.num_enqueued, source, target)
        self.copies.append(copy)
        return DelayedEvent(self, self.num_enqueued, copy)

    # -- the simulated device

    def maybe_progress(self) -> None:
        while self._random.random() < self._progress_probability and (self._queue or self.copies):
            ready = [copy for copy in self.copies if copy[0] <= self.num_done]
            if ready and (not self._queue or self._random.random() < 0.5):
                self.finish_copy(ready[0])
            elif self._queue:
                self.run_until(self.num_done + 1)

    def run_until(self, place: int) -> None:
        with torch.inference_mode():
            while self.num_done < place:
                self._queue.popleft()()
                self.num_done += 1

    def finish_copy(self, copy) -> None:
        self.copies.remove(copy)
        with torch.inference_mode():
            copy[2].copy_(copy[1])


class QueuedRunner:
    """A model runner whose synchronous forward passes execute the queued work first."""

    def __init__(self, runner, stream: DelayedStream) -> None:
        self._runner, self._stream = runner, stream

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, batch):
        self._stream.run_until(self._stream.num_enqueued)
        return self._runner.forward(batch)
