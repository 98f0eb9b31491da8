"""Decode steps as CUDA graphs: one per capture size, replayed with new inputs padded to that size.

A step of T tokens in R rows runs in the graph of the next capture size n >= T: n tokens in min(n, max_rows) rows. Rows
have one token each (decode) or up to MAX_Q_LEN (forced tokens). These two kinds have separate graphs, and so have
steps in which rows share prefixes. All of them are captured at the start, so that no step waits for a capture. Each
step is two graphs, the forward pass and the sampler, so that the forward pass runs while the host still fills masks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from plait.runtime.batch.batch import Batch
from plait.runtime.batch.prefix_groups import PrefixGroup
from plait.runtime.executor.gpu import static_prefix_groups
from plait.runtime.executor.gpu.gpu_sampler import GpuSampler
from plait.runtime.executor.gpu.graph_inputs import GraphInputs
from plait.runtime.executor.gpu.page_table import DevicePageTable
from plait.runtime.executor.gpu.stream import DeviceWork, Stream
from plait.runtime.executor.torch_runner import TorchRunner

MAX_Q_LEN = 8  # new tokens of one row
MAX_PAGE_TABLE_ENTRIES = 1 << 28  # 1 GB; far below 2^31, so that offsets into the table fit in 32 bits


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    tokens: int
    q_len: int  # the most new tokens of a row: 1 or MAX_Q_LEN
    has_shared_prefixes: bool = False


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


class DecodeGraphRunner:
    """Captures and replays decode steps of one model. `runner.kernels.fused` must be set."""

    def __init__(self, runner: TorchRunner, sampling: GpuSampler, stream: Stream, max_rows: int) -> None:
        self.runner, self.sampling, self.stream = runner, sampling, stream
        self.max_rows = max_rows = max_graph_rows(max_rows, runner.max_session_tokens)
        max_tokens = 2 * max_rows
        self.capture_sizes = {
            1: make_capture_sizes(max_rows),
            MAX_Q_LEN: make_multi_token_capture_sizes(max_tokens),
        }
        self.inputs = GraphInputs(max_rows, max_tokens, runner.max_session_tokens, stream)
        self.graphs: dict[GraphKey, CapturedStep] = {}
        self._logits = torch.empty((max_rows, runner.config.vocab_size), dtype=runner.dtype, device=stream.device)
        self._samplers: dict[int, DeviceWork] = {}  # by number of rows
        self.num_late_captures = 0  # during a step; 0 if `capture_all` was called

    @property
    def page_table(self) -> DevicePageTable:
        return self.inputs.page_table

    def graph_key(self, batch: Batch) -> GraphKey | None:
        """Returns the graph for a batch; None if a row samples no token, has too many, or the batch is too large.

        Rows with further logits (of prompts) or states have no graph either.
        """
        longest = max(row.count for row in batch.rows)
        samples_all = len(batch.sampled_requests) == len(batch.rows) == batch.num_logits and not batch.num_states
        if longest > MAX_Q_LEN or len(batch.rows) > self.max_rows or not samples_all:
            return None
        q_len = 1 if longest == 1 else MAX_Q_LEN
        sizes = self.capture_sizes[q_len]
        index = bisect.bisect_left(sizes, batch.num_tokens)
        return GraphKey(sizes[index], q_len, bool(self._groups(batch, q_len))) if index < len(sizes) else None

    def forward(self, batch: Batch, key: GraphKey) -> DeviceWork:
        """Starts the batch's forward pass. Returns the sampling work, to be enqueued once the masks are set.

        Until the next forward pass, `logits` returns what it left.
        """
        self._fill(batch, key)
        graph = self.graphs.get(key)
        if graph is None:
            self.num_late_captures += 1
            graph = self._capture(key)
        self.stream.enqueue(graph.forward)
        return graph.sample

    def capture_all(
        self, progress: Callable[[float], None] = lambda fraction: None, keys: list[GraphKey] | None = None
    ) -> None:
        """Captures every graph that `graph_key` can return, largest first: the memory pool does not grow later.

        With `keys` only those, for a trial.
        """
        self._fill(Batch(0), GraphKey(self.max_rows, 1))
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
            GraphKey(size, q_len, has_shared_prefixes)
            for q_len, sizes in self.capture_sizes.items()
            for size in sizes
            for has_shared_prefixes in kinds
            if size > 1 or not has_shared_prefixes
        ]
        return sorted(keys, key=lambda key: -key.tokens)

    def _groups(self, batch: Batch, q_len: int) -> list[PrefixGroup]:
        prefix_sharing = self.runner.prefix_sharing
        if prefix_sharing is None or len(batch.rows) < 2:
            return []
        return prefix_sharing.groups(batch.rows, q_len)[: static_prefix_groups.max_groups(len(batch.rows))]

    def _fill(self, batch: Batch, key: GraphKey) -> None:
        groups = self._groups(batch, key.q_len) if key.has_shared_prefixes else []
        self.inputs.fill(batch, groups)
        if self.runner.prefix_sharing is not None:
            self.runner.prefix_sharing.count(groups)

    def _capture(self, key: GraphKey) -> CapturedStep:
        """Captures a graph over the current inputs. Its trial runs may repeat: they write the same KV and logits."""
        runner, tokens, rows = self.runner, key.tokens, min(key.tokens, self.max_rows)
        fused = runner.kernels.fused
        assert fused is not None
        layout = self.inputs.layout(rows, tokens, key.q_len, key.has_shared_prefixes)
        token_ids, output_indices = self.inputs.token_ids(tokens), self.inputs.output_indices(rows)
        logits = self._logits[:rows]  # shared by all graphs

        def forward() -> None:
            self.inputs.write_page_table(layout)
            planned = fused.with_plans(layout, runner.attention_shapes)
            hidden = runner.model.forward(self.sampling.resolve_placeholders(token_ids), planned, runner.kv_cache)
            if key.q_len > 1:
                hidden = hidden[output_indices]
            logits.copy_(runner.model.unconverted_logits(hidden))

        captured_forward = self.stream.capture(forward)
        if rows not in self._samplers:
            self._samplers[rows] = self.stream.capture(lambda: self.sampling.sample(logits))
        graph = self.graphs[key] = CapturedStep(captured_forward, self._samplers[rows])
        return graph
