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

from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.executor.gpu.stream import Stream
from plait.runtime.executor.torch_runner import upload
from plait.runtime.kv_cache.sequence import Sequence


@dataclass
class _TableRow:
    number: int
    version: int
    count: int = 0


class DevicePageTable:
    """For batches of up to `num_rows` rows of up to `length` tokens."""

    def __init__(self, num_rows: int, length: int, stream: Stream) -> None:
        self._stream = stream
        self.length, self.padding_offset = length, num_rows * length
        self.flat = torch.zeros((num_rows + 1) * length, dtype=torch.int32, device=stream.device)
        self._rows: OrderedDict[Sequence, _TableRow] = OrderedDict()  # the one used longest ago first
        self._free = list(range(num_rows - 1, -1, -1))

    def assign_rows(self, rows: list[ScheduledRequest]) -> list[int]:
        """Where in `flat` each row begins. The pages before the rows' new tokens are there afterwards; the step itself
        is to write those of the new ones."""
        for each in rows:
            if each.request.seq in self._rows:
                self._rows.move_to_end(each.request.seq)
        table_rows = [self._row_of(each.request.seq) for each in rows]
        missing = [
            (each, table_row) for each, table_row in zip(rows, table_rows, strict=True) if table_row.count < each.start
        ]
        if missing:
            places = [np.arange(x.count, each.start, dtype=np.int32) + x.number * self.length for each, x in missing]
            pages = [each.request.seq.pages.view()[table_row.count : each.start] for each, table_row in missing]
            where, what = upload([np.concatenate(places), np.concatenate(pages)], self.flat.device)
            self._stream.enqueue(lambda: self._write(where, what))
        for each, table_row in zip(rows, table_rows, strict=True):
            table_row.count = each.start + each.count
        return [table_row.number * self.length for table_row in table_rows]

    def _write(self, where: torch.Tensor, what: torch.Tensor) -> None:
        self.flat[where] = what

    def _row_of(self, seq: Sequence) -> _TableRow:
        table_row = self._rows.get(seq)
        if table_row is None:
            number = self._free.pop() if self._free else self._rows.popitem(last=False)[1].number
            table_row = self._rows[seq] = _TableRow(number, seq.pages.version)
        elif table_row.version != seq.pages.version:
            table_row.version, table_row.count = seq.pages.version, 0
        return table_row
