"""A device that does its work late: a queue that goes on when somebody waits for it, or when it feels like it.

What is put in reads the host's buffers, the tokens drawn and the KV pages only when it is done; a copy to the host is
made at its own time, and until then its target holds rubbish. So whoever fills a buffer again too early, reads one too
early, draws over tokens that are still to be read, or hands on what was not awaited gets wrong tokens here.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

RUBBISH = -1_000_000


class LateMoment:
    def __init__(self, stream: LateStream, place: int, copy=None) -> None:
        self._stream, self._place, self._copy = stream, place, copy

    @property
    def has_come(self) -> bool:
        self._stream.feel_like_it()
        return self._stream.num_done >= self._place and self._copy not in self._stream.copies

    def wait(self) -> None:
        if not self.has_come:
            self._stream.num_waits += 1
        self._stream.work_until(self._place)
        if self._copy in self._stream.copies:
            self._stream.make(self._copy)


class LateStream:
    """`haste`: how likely it is, at each chance, to do one more piece of work. 0.0: never before it must."""

    def __init__(self, haste: float, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.num_put = self.num_done = self.num_waits = 0
        self.copies = []  # to the host: (place in the queue, source, target)
        self._queue, self._haste, self._random = deque(), haste, np.random.default_rng(seed)

    # -- what the engine uses

    def run(self, work) -> None:
        self._queue.append(work)
        self.num_put += 1
        self.feel_like_it()

    def record(self, work):
        self.work_until(self.num_put)
        with torch.inference_mode():
            work()
        return work

    def moment(self) -> LateMoment:
        return LateMoment(self, self.num_put)

    def fetch(self, source, target) -> LateMoment:
        target.fill_(RUBBISH)
        copy = (self.num_put, source, target)
        self.copies.append(copy)
        return LateMoment(self, self.num_put, copy)

    # -- what the device does

    def feel_like_it(self) -> None:
        while self._random.random() < self._haste and (self._queue or self.copies):
            ready = [copy for copy in self.copies if copy[0] <= self.num_done]
            if ready and (not self._queue or self._random.random() < 0.5):
                self.make(ready[0])
            elif self._queue:
                self.work_until(self.num_done + 1)

    def work_until(self, place: int) -> None:
        with torch.inference_mode():
            while self.num_done < place:
                self._queue.popleft()()
                self.num_done += 1

    def make(self, copy) -> None:
        self.copies.remove(copy)
        with torch.inference_mode():
            copy[2].copy_(copy[1])


class Behind:
    """A model runner whose own forwards, which the host waits for, come behind what is in the queue."""

    def __init__(self, runner, stream: LateStream) -> None:
        self._runner, self._stream = runner, stream

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def forward(self, batch):
        self._stream.work_until(self._stream.num_put)
        return self._runner.forward(batch)
