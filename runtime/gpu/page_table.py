"""Which pages each row stands on, kept on the device from step to step: a step brings only what is new.

    table [lanes + 1, length]   a sequence keeps a lane while it runs; the spare lane is where padding writes

A lane holds pages [0, count) of its sequence as they were at `version`; other changes than growth make it void.
Knows: sequences' pages. Must not know: tokens, kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from plait.runtime.gpu.stream import Stream
from plait.runtime.model_runner import upload
from plait.runtime.scheduler.rows import BatchRow
from plait.runtime.scheduler.sequence import Sequence


@dataclass
class _Lane:
    number: int
    version: int
    count: int = 0


class PageTable:
    """For batches of up to `num_lanes` rows of up to `length` tokens."""

    def __init__(self, num_lanes: int, length: int, stream: Stream) -> None:
        self._stream = stream
        self.length, self.spare_at = length, num_lanes * length
        self.flat = torch.zeros((num_lanes + 1) * length, dtype=torch.int32, device=stream.device)
        self._lanes: OrderedDict[Sequence, _Lane] = OrderedDict()  # the one used longest ago first
        self._free = list(range(num_lanes - 1, -1, -1))

    def place(self, rows: list[BatchRow]) -> list[int]:
        """Where in `flat` each row begins. The pages before the rows' new tokens are there afterwards; the step itself
        is to write those of the new ones."""
        for each in rows:
            if each.row.seq in self._lanes:
                self._lanes.move_to_end(each.row.seq)
        lanes = [self._lane(each.row.seq) for each in rows]
        missing = [(each, lane) for each, lane in zip(rows, lanes, strict=True) if lane.count < each.start]
        if missing:
            places = [np.arange(x.count, each.start, dtype=np.int32) + x.number * self.length for each, x in missing]
            pages = [each.row.seq.pages.view()[lane.count : each.start] for each, lane in missing]
            where, what = upload([np.concatenate(places), np.concatenate(pages)], self.flat.device)
            self._stream.run(lambda: self._write(where, what))
        for each, lane in zip(rows, lanes, strict=True):
            lane.count = each.start + each.count
        return [lane.number * self.length for lane in lanes]

    def _write(self, where: torch.Tensor, what: torch.Tensor) -> None:
        self.flat[where] = what

    def _lane(self, seq: Sequence) -> _Lane:
        lane = self._lanes.get(seq)
        if lane is None:
            number = self._free.pop() if self._free else self._lanes.popitem(last=False)[1].number
            lane = self._lanes[seq] = _Lane(number, seq.pages.version)
        elif lane.version != seq.pages.version:
            lane.version, lane.count = seq.pages.version, 0
        return lane
