"""The page table on the device: a step uploads only the pages that are new since the sequence's last step.

    flat [num_rows + 1, length]     a sequence keeps its table row while it runs; padding writes to the last row

A table row holds the pages [0, count) of its sequence as of `version`; any change other than growth invalidates it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.executor.gpu.stream import Stream
from plait.runtime.executor.torch_device import upload
from plait.runtime.kv_cache.sequence import Sequence


@dataclass
class _TableRow:
    number: int
    version: int
    count: int = 0  # valid pages


class DevicePageTable:
    """Page table for batches of up to `num_rows` rows of up to `length` tokens. ValueError if it has 2^31 entries."""

    def __init__(self, num_rows: int, length: int, stream: Stream) -> None:
        if (num_rows + 1) * length >= 1 << 31:
            raise ValueError(f"a page table of {num_rows} rows of {length} tokens has offsets beyond 32 bits")
        self._stream = stream
        self.length, self.padding_offset = length, num_rows * length
        self.flat = torch.zeros((num_rows + 1) * length, dtype=torch.int32, device=stream.device)
        self._rows: OrderedDict[Sequence, _TableRow] = OrderedDict()  # least recently used first
        self._free = list(range(num_rows - 1, -1, -1))

    def assign_rows(self, rows: list[ScheduledRequest]) -> list[int]:
        """Returns each row's offset in `flat`, and enqueues the upload of missing pages before the new tokens.

        The step itself writes the pages of the new tokens.
        """
        for row in rows:  # so that no sequence of this batch loses its table row to another
            if row.request.seq in self._rows:
                self._rows.move_to_end(row.request.seq)
        table_rows = [self._row_of(row.request.seq) for row in rows]
        offsets, pages = [], []
        for row, table_row in zip(rows, table_rows, strict=True):
            if table_row.count < row.start:
                indices = np.arange(table_row.count, row.start, dtype=np.int32)
                offsets.append(indices + table_row.number * self.length)
                pages.append(row.request.seq.pages.view()[table_row.count : row.start])
            table_row.count = row.start + row.count
        if offsets:
            at, values = upload([np.concatenate(offsets), np.concatenate(pages)], self.flat.device)
            self._stream.enqueue(lambda: self._write(at, values))
        return [table_row.number * self.length for table_row in table_rows]

    def _write(self, at: torch.Tensor, values: torch.Tensor) -> None:
        self.flat[at] = values

    def _row_of(self, seq: Sequence) -> _TableRow:
        table_row = self._rows.get(seq)
        if table_row is None:
            number = self._free.pop() if self._free else self._rows.popitem(last=False)[1].number
            table_row = self._rows[seq] = _TableRow(number, seq.pages.version)
        elif table_row.version != seq.pages.version:
            table_row.version, table_row.count = seq.pages.version, 0
        return table_row
