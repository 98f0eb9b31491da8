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

from plait.kernels.layout import AttentionLayout, shared_prefix_arrays
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.prefix_groups import PrefixGroup
from plait.runtime.executor.gpu import static_prefix_groups
from plait.runtime.executor.gpu.double_buffer import DoubleBuffer
from plait.runtime.executor.gpu.gpu_sampler import GpuSampler
from plait.runtime.executor.gpu.page_table import DevicePageTable
from plait.runtime.executor.gpu.stream import DeviceWork, Stream
from plait.runtime.executor.torch_runner import TorchRunner

Values = npt.NDArray[Any] | list[int]
MAX_Q_LEN = 8  # new tokens of one row


class GraphKey(NamedTuple):
    """What a graph is made for."""

    tokens: int
    q_len: int  # the most new tokens of a row: 1 or WIDEST
    has_shared_prefixes: bool = False  # whether rows may share prefixes


@dataclass
class CapturedStep:
    """`forward` leaves the logits where `sample` finds them."""

    forward: DeviceWork
    sample: DeviceWork


def make_capture_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, every eighth to 64, every sixteenth to 128, then by 64, and `largest` itself.

    >>> make_capture_sizes(40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(192, largest + 1, 64)]
    return [*(step for step in steps if step < largest), largest]


class DecodeGraphRunner:
    """Graphs over one model's weights and caches; `runner.kernels.fused` must be there."""

    def __init__(self, runner: TorchRunner, sampling: GpuSampler, stream: Stream, max_rows: int) -> None:
        self.runner, self.sampling, self.stream = runner, sampling, stream
        self.max_rows = max_rows
        self.capture_sizes = {1: make_capture_sizes(self.max_rows), MAX_Q_LEN: make_capture_sizes(2 * self.max_rows)}
        self.page_table = DevicePageTable(self.max_rows, runner.max_session_tokens, stream)
        rows, tokens = self.max_rows, 2 * self.max_rows
        self.buffers = DoubleBuffer(
            dict.fromkeys(("token_ids", "positions", "write_slots"), (torch.int32, tokens))
            | {"q_starts": (torch.int32, rows + 1), "kv_starts": (torch.int32, rows + 1)}
            | {
                "page_starts": (torch.int32, rows),
                "output_indices": (torch.int64, rows),
                "page_table_slots": (torch.int64, tokens),
            }
            | {name: (torch.int32, count) for name, count in static_prefix_groups.array_lengths(rows, tokens).items()},
            stream,
        )
        self.graphs: dict[GraphKey, CapturedStep] = {}
        self._group_arrays_key: tuple[list[PrefixGroup], bytes] = (
            [],
            b"",
        )  # what the arrays of groups were made of last
        self._group_arrays_cache: list[npt.NDArray[np.int32]] = []

    def graph_key(self, batch: Batch) -> GraphKey | None:
        """The graph for a batch; None if some row gets no token yet, or it is too wide or too large."""
        most = max(each.count for each in batch.rows)
        if most > MAX_Q_LEN or len(batch.rows) > self.max_rows or not all(each.is_sampled for each in batch.rows):
            return None
        q_len = 1 if most == 1 else MAX_Q_LEN
        capture_sizes = self.capture_sizes[q_len]
        at = bisect.bisect_left(capture_sizes, batch.num_tokens)
        return GraphKey(capture_sizes[at], q_len, bool(self._groups(batch, q_len))) if at < len(capture_sizes) else None

    def _groups(self, batch: Batch, q_len: int) -> list[PrefixGroup]:
        prefix_sharing = self.runner.prefix_sharing
        if prefix_sharing is None or len(batch.rows) < 2:
            return []
        return prefix_sharing.groups(batch.rows, q_len)[: static_prefix_groups.max_groups(len(batch.rows))]

    def _group_arrays(self, groups: list[PrefixGroup], counts: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Made anew where something has changed: 50 us for 64 rows."""
        made_of = groups, counts.tobytes()
        if groups and made_of != self._group_arrays_key:
            self._group_arrays_key, self._group_arrays_cache = made_of, shared_prefix_arrays(groups, counts)
        return self._group_arrays_cache if groups else []

    def forward(self, batch: Batch, size: GraphKey) -> DeviceWork:
        """Starts the batch's forward and gives what samples from it, to be called once the masks are set."""
        self._fill(batch, size)
        graph = self.graphs.get(size)
        if graph is None:
            graph = self._capture(size)  # which computes this batch's logits, or leaves inputs as they are
        self.stream.enqueue(graph.forward)
        return graph.sample

    def capture_decode_graphs(self, progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Captures all sizes of decoding, the largest first: the pool need not grow then."""
        self._fill(Batch(0), GraphKey(self.max_rows, 1))
        kinds = (False,) if self.runner.prefix_sharing is None else (False, True)
        keys = [GraphKey(n, 1, shared) for n in self.capture_sizes[1][::-1] for shared in kinds if n > 1 or not shared]
        for i, size in enumerate(keys):
            self._capture(size)
            progress((i + 1) / len(keys))

    def _fill(self, batch: Batch, size: GraphKey) -> None:
        """The batch's inputs, padded, on their way to the device."""
        self.buffers.begin()
        host, rows = self.buffers.host, batch.rows
        num_rows, num_tokens = len(rows), batch.num_tokens
        firsts = self.page_table.assign_rows(rows)
        starts = [each.start for each in rows]
        counts = np.array([each.count for each in rows], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        _fill(host["q_starts"][1:], ends, num_tokens)
        kv_ends = np.cumsum(np.array(starts, dtype=np.int32) + counts, dtype=np.int32)
        _fill(host["kv_starts"][1:], kv_ends, kv_ends[-1] if num_rows else 0)
        _fill(host["page_starts"], firsts, self.page_table.padding_offset)
        _fill(host["output_indices"], ends - 1, 0)
        if num_tokens == num_rows:
            positions = np.array(starts, dtype=np.int64)
            write_slots: Values = [_decode_write_slot(each) for each in rows]
            token_ids: Values = [each.single_token_id() for each in rows]
        else:
            positions = np.concatenate([np.arange(each.start, each.start + each.count) for each in rows])
            write_slots = np.concatenate([each.pages()[each.start :] for each in rows])
            token_ids = batch.token_ids()
        _fill(host["positions"], positions, 0)
        _fill(host["write_slots"], write_slots, -1)
        _fill(host["token_ids"], token_ids, 0)
        _fill(
            host["page_table_slots"],
            positions + np.repeat(np.array(firsts, dtype=np.int64), counts),
            self.page_table.padding_offset,
        )
        groups = self._groups(batch, size.q_len) if size.has_shared_prefixes else []
        static_prefix_groups.fill(host, self._group_arrays(groups, counts))
        if self.runner.prefix_sharing is not None:
            self.runner.prefix_sharing.count(groups)
        self.buffers.upload()

    def _capture(self, size: GraphKey) -> CapturedStep:
        tokens, rows = size.tokens, min(size.tokens, self.max_rows)
        device, runner, page_table = self.buffers.device, self.runner, self.page_table.flat
        fused = runner.kernels.fused
        assert fused is not None
        layout = AttentionLayout(
            q_starts=device["q_starts"][: rows + 1],
            kv_starts=device["kv_starts"][: rows + 1],
            kv_pages=page_table,
            positions=device["positions"][:tokens],
            write_slots=device["write_slots"][:tokens],
            page_starts=device["page_starts"][:rows],
            min_q_len=1,
            max_q_len=size.q_len,
            shared=static_prefix_groups.view(device, rows, tokens) if size.has_shared_prefixes else None,
        )
        logits: list[torch.Tensor] = []  # kept, so that nothing else comes to lie in their place

        def forward() -> None:
            page_table[device["page_table_slots"][:tokens]] = layout.write_slots
            planned = fused.with_plans(layout, runner.attention_shapes)
            token_ids = self.sampling.resolve_placeholders(device["token_ids"][:tokens])
            hidden = runner.model.forward(token_ids, planned, runner.kv_cache)
            if size.q_len > 1:
                hidden = hidden[device["output_indices"][:rows]]
            logits[:] = [runner.model.logits(hidden)]

        replay = self.stream.capture(forward)
        graph = CapturedStep(replay, self.stream.capture(lambda: self.sampling.sample(logits[0])))
        self.graphs[size] = graph
        return graph


def _decode_write_slot(each: ScheduledRequest) -> int:
    return int(each.request.seq.pages.view()[each.start]) if each.placeholder is None else each.placeholder.page


def _fill(target: npt.NDArray[Any], values: Values, rest: int) -> None:
    """The values first, then `rest`."""
    count = len(values)
    target[:count] = values
    target[count:] = rest
