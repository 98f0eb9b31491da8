"""Decode steps as captured graphs: one for each size of a ladder, padded with empty rows, replayed with new inputs.

A step of R rows and T tokens runs in the graph of the next size n: n tokens in min(n, max_rows) rows. Rows bring one
token each (decode), or up to WIDEST (forced tokens); the two kinds have graphs of their own, and so have steps in which
rows share prefixes that are read once. A graph is two: the forward, which can run while the host still fills masks, and
the sampler behind it.

Knows: the model's forward, static buffers. Must not know: how capture works, sessions.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.layout import AttentionLayout, shared_arrays
from plait.runtime.gpu import static_groups
from plait.runtime.gpu.buffers import TwinBuffers
from plait.runtime.gpu.device_sampling import DeviceSampling
from plait.runtime.gpu.page_table import PageTable
from plait.runtime.gpu.stream import Stream, Work
from plait.runtime.model_runner import ModelRunner
from plait.runtime.scheduler.prefix_groups import PrefixGroup
from plait.runtime.scheduler.rows import Batch, BatchRow

Values = npt.NDArray[Any] | list[int]
WIDEST = 8  # new tokens of one row


class Size(NamedTuple):
    """What a graph is made for."""

    tokens: int
    q_len: int  # the most new tokens of a row: 1 or WIDEST
    is_shared: bool = False  # whether rows may share prefixes


@dataclass
class Graph:
    """`forward` leaves the logits where `sample` finds them."""

    forward: Work
    sample: Work


def ladder(largest: int) -> list[int]:
    """1, 2, 4, 8, every eighth to 64, every sixteenth to 128, then by 64, and `largest` itself.

    >>> make_capture_sizes(40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(192, largest + 1, 64)]
    return [*(step for step in steps if step < largest), largest]


class DecodeGraphs:
    """Graphs over one model's weights and caches; `runner.kernels.fused` must be there."""

    def __init__(self, runner: ModelRunner, sampling: DeviceSampling, stream: Stream, max_rows: int) -> None:
        self.runner, self.sampling, self.stream = runner, sampling, stream
        self.max_rows = max_rows
        self.sizes = {1: ladder(self.max_rows), WIDEST: ladder(2 * self.max_rows)}
        self.table = PageTable(self.max_rows, runner.max_session_tokens, stream)
        rows, tokens = self.max_rows, 2 * self.max_rows
        self.buffers = TwinBuffers(
            dict.fromkeys(("token_ids", "positions", "write_pages"), (torch.int32, tokens))
            | {"q_starts": (torch.int32, rows + 1), "kv_starts": (torch.int32, rows + 1)}
            | {"page_starts": (torch.int32, rows), "wanted": (torch.int64, rows), "places": (torch.int64, tokens)}
            | {name: (torch.int32, count) for name, count in static_groups.array_lengths(rows, tokens).items()},
            stream,
        )
        self.graphs: dict[Size, Graph] = {}
        self._grouped: tuple[list[PrefixGroup], bytes] = ([], b"")  # what the arrays of groups were made of last
        self._group_parts: list[npt.NDArray[np.int32]] = []

    def size_of(self, batch: Batch) -> Size | None:
        """The graph for a batch; None if some row gets no token yet, or it is too wide or too large."""
        most = max(each.count for each in batch.rows)
        if most > WIDEST or len(batch.rows) > self.max_rows or not all(each.is_sampled for each in batch.rows):
            return None
        q_len = 1 if most == 1 else WIDEST
        sizes = self.sizes[q_len]
        at = bisect.bisect_left(sizes, batch.num_tokens)
        return Size(sizes[at], q_len, bool(self._groups(batch, q_len))) if at < len(sizes) else None

    def _groups(self, batch: Batch, q_len: int) -> list[PrefixGroup]:
        sharing = self.runner.sharing
        if sharing is None or len(batch.rows) < 2:
            return []
        return sharing.groups(batch.rows, q_len)[: static_groups.most_groups(len(batch.rows))]

    def _group_arrays(self, groups: list[PrefixGroup], counts: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Made anew where something has changed: 50 us for 64 rows."""
        made_of = groups, counts.tobytes()
        if groups and made_of != self._grouped:
            self._grouped, self._group_parts = made_of, shared_arrays(groups, counts)
        return self._group_parts if groups else []

    def forward(self, batch: Batch, size: Size) -> Work:
        """Starts the batch's forward and gives what samples from it, to be called once the masks are set."""
        self._fill(batch, size)
        graph = self.graphs.get(size)
        if graph is None:
            graph = self._capture(size)  # which computes this batch's logits, or leaves inputs as they are
        self.stream.run(graph.forward)
        return graph.sample

    def capture_decode(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Captures all sizes of decoding, the largest first: the pool need not grow then."""
        self._fill(Batch(0), Size(self.max_rows, 1))
        kinds = (False,) if self.runner.sharing is None else (False, True)
        todo = [Size(n, 1, shared) for n in self.sizes[1][::-1] for shared in kinds if n > 1 or not shared]
        for i, size in enumerate(todo):
            self._capture(size)
            progress((i + 1) / len(todo))

    def _fill(self, batch: Batch, size: Size) -> None:
        """The batch's inputs, padded, on their way to the device."""
        self.buffers.begin()
        host, rows = self.buffers.host, batch.rows
        num_rows, num_tokens = len(rows), batch.num_tokens
        firsts = self.table.place(rows)
        starts = [each.start for each in rows]
        counts = np.array([each.count for each in rows], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        _fill(host["q_starts"][1:], ends, num_tokens)
        kv_ends = np.cumsum(np.array(starts, dtype=np.int32) + counts, dtype=np.int32)
        _fill(host["kv_starts"][1:], kv_ends, kv_ends[-1] if num_rows else 0)
        _fill(host["page_starts"], firsts, self.table.spare_at)
        _fill(host["wanted"], ends - 1, 0)
        if num_tokens == num_rows:
            positions = np.array(starts, dtype=np.int64)
            write_pages: Values = [_only_page(each) for each in rows]
            token_ids: Values = [each.only_token() for each in rows]
        else:
            positions = np.concatenate([np.arange(each.start, each.start + each.count) for each in rows])
            write_pages = np.concatenate([each.pages()[each.start :] for each in rows])
            token_ids = batch.token_ids()
        _fill(host["positions"], positions, 0)
        _fill(host["write_pages"], write_pages, -1)
        _fill(host["token_ids"], token_ids, 0)
        _fill(host["places"], positions + np.repeat(np.array(firsts, dtype=np.int64), counts), self.table.spare_at)
        groups = self._groups(batch, size.q_len) if size.is_shared else []
        static_groups.fill(host, self._group_arrays(groups, counts))
        if self.runner.sharing is not None:
            self.runner.sharing.count(groups)
        self.buffers.upload()

    def _capture(self, size: Size) -> Graph:
        tokens, rows = size.tokens, min(size.tokens, self.max_rows)
        device, runner, table = self.buffers.device, self.runner, self.table.flat
        fused = runner.kernels.fused
        assert fused is not None
        layout = AttentionLayout(
            q_starts=device["q_starts"][: rows + 1],
            kv_starts=device["kv_starts"][: rows + 1],
            kv_pages=table,
            positions=device["positions"][:tokens],
            write_pages=device["write_pages"][:tokens],
            page_starts=device["page_starts"][:rows],
            min_q_len=1,
            max_q_len=size.q_len,
            shared=static_groups.view(device, rows, tokens) if size.is_shared else None,
        )
        logits: list[torch.Tensor] = []  # kept, so that nothing else comes to lie in their place

        def forward() -> None:
            table[device["places"][:tokens]] = layout.write_pages
            planned = fused.with_plans(layout, runner.attention_shapes)
            token_ids = self.sampling.known(device["token_ids"][:tokens])
            hidden = runner.model.forward(token_ids, planned, runner.kv_cache)
            if size.q_len > 1:
                hidden = hidden[device["wanted"][:rows]]
            logits[:] = [runner.model.logits(hidden)]

        replay = self.stream.record(forward)
        graph = Graph(replay, self.stream.record(lambda: self.sampling.sample(logits[0])))
        self.graphs[size] = graph
        return graph


def _only_page(each: BatchRow) -> int:
    return int(each.row.seq.pages.view()[each.start]) if each.ahead is None else each.ahead.page


def _fill(target: npt.NDArray[Any], values: Values, rest: int) -> None:
    """The values first, then `rest`."""
    count = len(values)
    target[:count] = values
    target[count:] = rest
