"""The page table on the device, compared with the pages of the sequences."""

from __future__ import annotations

import numpy as np
from engine_runs import CPU
from synchronous_stream import ImmediateStream

from plait.runtime.batch.batch import ScheduledRequest
from plait.runtime.batch.request import Request
from plait.runtime.executor.gpu.page_table import DevicePageTable
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence


def test_the_page_table_equals_the_pages_of_the_sequences_after_every_change():
    page_table = DevicePageTable(3, 16, ImmediateStream(CPU))
    seqs = [Sequence(CacheNamespace(), [1] * 16) for _ in range(5)]
    generator = np.random.default_rng(0)
    for _ in range(300):
        chosen = generator.choice(5, size=generator.integers(1, 4), replace=False)
        for i in chosen:
            seq, kind = seqs[i], generator.integers(0, 4)
            if kind == 0:
                seq.pages.truncate(int(generator.integers(0, len(seq.pages) + 1)))
            elif kind == 1 and len(seq.pages):
                seq.pages.replace(0, generator.integers(0, 999, len(seq.pages)).astype(np.int32))
            if len(seq.pages) > 14:
                seq.pages.truncate(3)
            seq.pages.extend(generator.integers(0, 999, generator.integers(1, 3)).astype(np.int32))
        rows = [ScheduledRequest(Request(None, seqs[i], 0, 0), len(seqs[i].pages) - 1, 1, 1) for i in chosen]
        for row, first in zip(rows, page_table.assign_rows(rows), strict=True):
            pages = row.request.seq.pages.view()
            page_table.flat[first + row.start] = int(pages[-1])  # as the step does
            assert page_table.flat[first : first + len(pages)].tolist() == pages.tolist()
