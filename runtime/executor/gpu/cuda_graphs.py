"""Steps as CUDA graphs: one per capture size, replayed with new inputs padded to that size.

A step of T tokens in R rows runs in the graph of the next capture size n >= T: n tokens in min(n, max_rows) rows. Rows
have one token each (decode) or up to MAX_Q_LEN (forced tokens). These two kinds have separate graphs, and so have
steps in which rows share prefixes. Steps with longer rows (prompts) run in pieces, see `piecewise_graphs`. All graphs
are captured at the start, so that no step waits for a capture. Each step is two graphs, the forward pass and the
sampler, so that the forward pass runs while the host still fills masks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer, FusedOperators
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.prefix_groups import PrefixGroup
from plait.runtime.executor.gpu import static_prefix_groups
from plait.runtime.executor.gpu.gpu_sampler import GpuSampler
from plait.runtime.executor.gpu.graph_inputs import GraphInputs
from plait.runtime.executor.gpu.stream import DeviceWork, Stream
from plait.runtime.executor.torch_device import upload
from plait.runtime.executor.torch_runner import TorchRunner
from plait.runtime.models.layers import StepUpdates

MAX_Q_LEN = 8  # new tokens of one row
PIECEWISE = 0  # as `GraphKey.q_len`: any number
MAX_PAGE_TABLE_ENTRIES = 1 << 28  # 1 GB; far below 2^31, so that offsets into the table fit in 32 bits


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    tokens: int
    q_len: int  # the most new tokens of a row: 1 or MAX_Q_LEN; PIECEWISE: any
    has_shared_prefixes: bool = False  # of PIECEWISE graphs always False: attention is outside
    has_adapters: bool = False  # whether a row has one


@dataclass
class CapturedStep:
    """Replayable work. `forward` leaves logits where `sample` reads them."""

    forward: DeviceWork
    sample: DeviceWork


def make_capture_sizes(largest: int) -> list[int]:
    """Returns 1, 2, 4, multiples of 8 up to 64, of 16 up to 128, of 64 beyond, and `largest` itself.

    >>> make_capture_sizes(40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(192, largest + 1, 64)]
    return [*(size for size in sizes if size < largest), largest]


def make_multi_token_capture_sizes(largest: int) -> list[int]:
    """Returns the powers of two from 2, and `largest` itself: steps of forced tokens are rare, and need few graphs.

    >>> make_multi_token_capture_sizes(12)
    [2, 4, 8, 12]
    """
    return [*(1 << i for i in range(1, largest.bit_length()) if 1 << i < largest), largest]


def max_graph_rows(max_rows: int, max_session_tokens: int) -> int:
    """Returns how many rows the graphs may have, so that the page table stays within MAX_PAGE_TABLE_ENTRIES."""
    return max(1, min(max_rows, MAX_PAGE_TABLE_ENTRIES // max_session_tokens - 1))


class GraphRunner:
    """Captures and replays steps of one model. `runner.kernels.fused` must be set."""

    def __init__(self, runner: TorchRunner, sampling: GpuSampler, stream: Stream, max_rows: int) -> None:
        self.runner, self.sampling, self.stream = runner, sampling, stream
        self.max_rows = max_rows = max_graph_rows(max_rows, runner.max_session_tokens)
        max_decode_tokens, max_tokens = 2 * max_rows, max_piecewise_tokens(max_rows, runner.max_batch_tokens)
        self.capture_sizes = {
            1: make_capture_sizes(max_rows),
            MAX_Q_LEN: make_multi_token_capture_sizes(max_decode_tokens),
            PIECEWISE: make_piecewise_capture_sizes(max_tokens),
        }
        self.inputs = GraphInputs(max_rows, max(max_decode_tokens, max_tokens), runner.max_session_tokens, stream)
        self.graphs: dict[GraphKey, CapturedStep] = {}
        self.piecewise: dict[GraphKey, PiecewiseForward] = {}
        self._piece_buffers = PieceBuffers(runner, max_tokens)
        self._heads: dict[tuple[int, bool], DeviceWork] = {}  # logits of piecewise steps: rows, with adapters or not
        self._logits = torch.empty((max_rows, runner.config.vocab_size), dtype=runner.dtype, device=stream.device)
        self._samplers: dict[int, DeviceWork] = {}  # by number of rows
        self.num_late_captures = 0  # during a step; 0 if `capture_all` was called

    def graph_key(self, batch: Batch) -> GraphKey | None:
        """Returns the graph for a batch; None if it has too many rows or tokens.

        A batch is PIECEWISE if a row samples no token, has more than MAX_Q_LEN, or has further logits or states.
        """
        if len(batch.rows) > self.max_rows:
            return None
        longest = max(row.count for row in batch.rows)
        q_len = 1 if longest == 1 else MAX_Q_LEN
        if longest > MAX_Q_LEN or not (samples_only(batch) and len(batch.rows) == batch.num_logits):
            q_len = PIECEWISE
        sizes = self.capture_sizes[q_len]
        index = bisect.bisect_left(sizes, batch.num_tokens)
        if index == len(sizes) and q_len != PIECEWISE:
            q_len, sizes = PIECEWISE, self.capture_sizes[PIECEWISE]
            index = bisect.bisect_left(sizes, batch.num_tokens)
        if index == len(sizes):
            return None
        has_groups = q_len != PIECEWISE and bool(self._groups(batch, q_len))
        return GraphKey(sizes[index], q_len, has_groups, self._has_adapters(batch))

    def is_captured(self, key: GraphKey) -> bool:
        """Whether a step with this key waits for no capture."""
        return key in self.piecewise or key in self.graphs

    def forward(self, batch: Batch, key: GraphKey) -> DeviceWork:
        """Starts the batch's forward pass. Returns the sampling work, to be enqueued once the masks are set.

        The batch `samples_only`. Until the next forward pass, `logits` returns what it left.
        """
        if key.q_len == PIECEWISE:
            self.stream.enqueue(self._piecewise_forward(batch, key))
            sizes = self.capture_sizes[1]
            rows = sizes[bisect.bisect_left(sizes, max(1, batch.num_logits))]
            if batch.num_logits:
                self.stream.enqueue(self._heads[rows, key.has_adapters])
            return self._sampler(rows)
        self._fill(batch, self._groups(batch, key.q_len) if key.has_shared_prefixes else [])
        self._capture_late(key)
        graph = self.graphs[key]
        self.stream.enqueue(graph.forward)
        return graph.sample

    def piecewise_states(self, batch: Batch, key: GraphKey) -> Callable[[], torch.Tensor]:
        """Returns device work: the PIECEWISE forward pass of any batch; returns the hidden states as `run_forward`."""
        forward = self._piecewise_forward(batch, key)
        q_ends = itertools.accumulate(row.count for row in batch.rows)
        spans = ((end - row.num_logits - row.num_states, end) for row, end in zip(batch.rows, q_ends, strict=True))
        indices = [index for span in spans for index in range(*span)]
        (at,) = upload([np.array(indices, dtype=np.int32)], self.stream.device)

        def states() -> torch.Tensor:
            forward()
            return self._piece_buffers.hidden[at]

        return states

    def capture_all(
        self, progress: Callable[[float], None] = lambda fraction: None, keys: list[GraphKey] | None = None
    ) -> None:
        """Captures every graph that `graph_key` can return, largest first: the memory pool does not grow later.

        With `keys` only those, for a trial.
        """
        self._fill(Batch(0), [])
        self.sampling.warm_up(self._logits)
        keys = self.all_keys() if keys is None else keys
        for i, key in enumerate(keys):
            self._capture(key)
            progress((i + 1) / len(keys))

    def logits(self, num_rows: int) -> torch.Tensor:
        """Returns the logits [num_rows, V] of the last step."""
        return self._logits[:num_rows]

    def all_keys(self) -> list[GraphKey]:
        """Returns the keys of all graphs, those of most tokens first."""
        kinds = (False,) if self.runner.prefix_sharing is None else (False, True)
        keys = [
            GraphKey(size, q_len, has_shared_prefixes, has_adapters)
            for q_len, sizes in self.capture_sizes.items()
            for size in sizes
            for has_shared_prefixes in kinds
            if not has_shared_prefixes or (size > 1 and q_len != PIECEWISE)
            for has_adapters in ((False,) if self.runner.adapter_pool is None else (False, True))
        ]
        return sorted(keys, key=lambda key: -key.tokens)

    def _groups(self, batch: Batch, q_len: int) -> list[PrefixGroup]:
        prefix_sharing = self.runner.prefix_sharing
        if prefix_sharing is None or len(batch.rows) < 2:
            return []
        return prefix_sharing.groups(batch.rows, q_len)[: static_prefix_groups.max_groups(len(batch.rows))]

    def _has_adapters(self, batch: Batch) -> bool:
        return self.runner.adapter_pool is not None and any(row.request.seq.namespace.adapter for row in batch.rows)

    def _updates(self, key: GraphKey, at: torch.Tensor | None = None) -> StepUpdates | None:
        """What adapters add in a graph: to all its tokens, or to those at some indices."""
        if not key.has_adapters or self.runner.adapter_slots is None:
            return None
        slots = self.inputs.adapter_slots
        return self.runner.adapter_slots.captured(slots[: key.tokens] if at is None else slots[at])

    def _fill(self, batch: Batch, groups: list[PrefixGroup]) -> None:
        rows = self.runner.adapter_rows(batch)
        self.inputs.fill(batch, groups, () if rows is None else rows.of_tokens)
        if self.runner.prefix_sharing is not None:
            self.runner.prefix_sharing.count(groups)

    def _piecewise_forward(self, batch: Batch, key: GraphKey) -> DeviceWork:
        """Uploads the batch; returns its forward pass, to be run on the device."""
        counts = [row.count for row in batch.rows]
        groups = self._groups(batch, max(counts))
        self._fill(batch, groups)
        self._capture_late(key)
        layout = self.inputs.layout(len(counts), batch.num_tokens, max(counts), bool(groups), min(counts))
        return partial(self.piecewise[key].run, layout, batch.num_tokens)

    def _capture_late(self, key: GraphKey) -> None:
        if not self.is_captured(key):
            self.num_late_captures += 1
            self._capture(key)

    def _capture(self, key: GraphKey) -> None:
        """Captures a graph over the current inputs. Its trial runs may repeat: they write the same KV and logits."""
        if key.q_len == PIECEWISE:
            self._capture_piecewise(key)
        else:
            self._capture_whole(key)

    def _capture_whole(self, key: GraphKey) -> None:
        runner, tokens, rows = self.runner, key.tokens, min(key.tokens, self.max_rows)
        fused = runner.kernels.fused
        assert fused is not None
        layout = self.inputs.layout(rows, tokens, key.q_len, key.has_shared_prefixes)
        token_ids, output_indices = self.inputs.token_ids(tokens), self.inputs.output_indices(rows)
        logits = self._logits[:rows]  # shared by all graphs

        def forward() -> None:
            self.inputs.write_page_table(layout)
            planned = fused.with_plans(layout, runner.attention_shapes)
            ids, updates = self.sampling.resolve_placeholders(token_ids), self._updates(key)
            hidden = runner.model.forward(ids, planned, runner.kv_cache, updates=updates)
            if key.q_len > 1:
                hidden, updates = hidden[output_indices], self._updates(key, output_indices)
            logits.copy_(runner.model.unconverted_logits(hidden, updates))

        self.graphs[key] = CapturedStep(self.stream.capture(forward), self._sampler(rows))

    def _capture_piecewise(self, key: GraphKey) -> None:
        layout, token_ids = self.inputs.layout(1, key.tokens, key.tokens, False), self.inputs.token_ids(key.tokens)

        def prepare() -> torch.Tensor:
            self.inputs.write_page_table(layout)
            return self.sampling.resolve_placeholders(token_ids)

        self.piecewise[key] = PiecewiseForward(
            self.runner, self.stream, self._piece_buffers, key.tokens, prepare, layout, partial(self._updates, key)
        )
        for rows in reversed(self.capture_sizes[1]):
            if (rows, key.has_adapters) not in self._heads:
                write = partial(self._write_logits, rows, key)
                self._heads[rows, key.has_adapters] = self.stream.capture(write)
                self._sampler(rows)

    def _write_logits(self, rows: int, key: GraphKey) -> None:
        at = self.inputs.output_indices(rows)
        updates = self._updates(key, at)
        self._logits[:rows].copy_(self.runner.model.unconverted_logits(self._piece_buffers.hidden[at], updates))

    def _sampler(self, rows: int) -> DeviceWork:
        if rows not in self._samplers:
            self._samplers[rows] = self.stream.capture(partial(self.sampling.sample, self._logits[:rows]))
        return self._samplers[rows]


def samples_only(batch: Batch) -> bool:
    """Whether the batch's logits are those that tokens are sampled from, and no states are read."""
    return batch.num_logits == len(batch.sampled_requests) and not batch.num_states


# -- piecewise graphs -----------------------------------------------------------------------------
# Forward passes as one CUDA graph between every two attention calls, for steps with prompts (piecewise capture).
#
#     graph [ embed, norm, q k v, rotate, write KV ]  attention 0  [ o, norm, MLP, norm, ... ]  attention 1  [ ...
#
# What a graph computes depends on the number of new tokens only, and each size serves every step that has at most so
# many (padded). Attention is launched outside, with the rows and tokens of the step; layers of one kind repeat the
# launches of the first, see `FusedOperators.bind_attention`. Queries, attention's output and the last hidden states are
# in buffers that all sizes share; what else a graph needs is in the pool of all graphs.

MIN_PIECEWISE_TOKENS = 1024  # that graphs reach; with more, a GPU computes longer than the host launches


def max_piecewise_tokens(max_rows: int, max_batch_tokens: int) -> int:
    """Returns the most tokens of a step in pieces: of many decoding rows, as many tokens of prompts beside them.

    >>> [max_piecewise_tokens(rows, 8192) for rows in (64, 512, 1000)]
    [1024, 1024, 2000]
    """
    return min(max(MIN_PIECEWISE_TOKENS, 2 * max_rows), max_batch_tokens)


def make_piecewise_capture_sizes(largest: int) -> list[int]:
    """Returns 16, 32, multiples of 64 up to 512, of 128 up to 1,024, of 256 beyond, and `largest` itself.

    Up to about 200 tokens a step reads weights most of its time, so that padding costs little.

    >>> make_piecewise_capture_sizes(200)
    [16, 32, 64, 128, 192, 200]
    """
    sizes = [16, 32, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, largest + 1, 256)]
    return [*(size for size in sizes if size < largest), largest]


class PieceBuffers:
    """What the graphs of all sizes and attention share, for up to `max_tokens` tokens."""

    def __init__(self, runner: TorchRunner, max_tokens: int) -> None:
        config, dtype, device = runner.config, runner.dtype, runner.device
        heads = (max_tokens, config.num_heads, config.head_dim)
        self.queries = torch.zeros(heads, dtype=dtype, device=device)
        self.attended = torch.zeros_like(self.queries)
        self.hidden = torch.zeros((max_tokens, config.hidden_size), dtype=dtype, device=device)


class PiecewiseForward:
    """A captured forward pass over `tokens` tokens, whose hidden states it leaves in `buffers.hidden`.

    `prepare()` returns token ids [tokens] and is the first part of the captured work, `updates()` the second one;
    `layout` has the positions and the write slots that the graphs read. The trial runs of a capture write no KV if the
    write slots are negative.
    """

    def __init__(
        self,
        runner: TorchRunner,
        stream: Stream,
        buffers: PieceBuffers,
        tokens: int,
        prepare: Callable[[], torch.Tensor],
        layout: AttentionLayout,
        updates: Callable[[], StepUpdates | None],
    ) -> None:
        self._runner, self._buffers, self._tokens = runner, buffers, tokens
        self._prepare, self._layout, self._updates = prepare, layout, updates
        self._layers: list[AttentionLayer] = []
        self._replay = stream.capture_pieces(self._forward)
        self._attention = self._fused.bind_attention(self._layers)

    @property
    def _fused(self) -> FusedOperators:
        fused = self._runner.kernels.fused
        assert fused is not None
        return fused

    def run(self, layout: AttentionLayout, tokens: int) -> None:
        """Repeats the pass over the inputs in its buffers; attention is that of `layout`, with its `tokens` tokens."""
        planned = self._fused.with_plans(layout, self._runner.attention_shapes)
        self._replay(self._attention(self._buffers.queries[:tokens], planned, self._buffers.attended[:tokens]))

    def _forward(self, split: DeviceWork) -> None:
        """The pass without attention: calls `split` at its places, and lists the layers of these."""
        model, kernels, fused = self._runner.model, self._runner.model.kernels, self._fused
        self._layers.clear()

        def attention(
            q: torch.Tensor, layer: AttentionLayer, layout: AttentionLayout, *, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            self._layers.append(layer)
            split()
            return self._buffers.attended[: self._tokens]

        rotate_and_write = partial(fused.rotate_and_write, out=self._buffers.queries[: self._tokens])
        model.kernels = replace(kernels, fused=replace(fused, attention=attention, rotate_and_write=rotate_and_write))
        try:
            token_ids, caches = self._prepare(), self._runner.kv_cache
            hidden = model.forward(token_ids, self._layout, caches, updates=self._updates())
        finally:
            model.kernels = kernels
        self._buffers.hidden[: self._tokens].copy_(hidden)
