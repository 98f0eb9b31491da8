"""Forward passes as one CUDA graph between every two attention calls, for steps with prompts (piecewise capture).

    graph [ embed, norm, q k v, rotate, write KV ]  attention 0  [ o, norm, MLP, norm, q k v, ... ]  attention 1  [ ...

What a graph computes depends on the number of new tokens only, and each size serves every step that has at most so many
(padded). Attention is launched outside, with the rows and tokens of the step; layers of one kind repeat the launches of
the first, see `FusedOperators.bind_attention`. Queries, attention's output and the last hidden states are in buffers
that all sizes share; what else a graph needs is in the pool of all graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import AttentionLayer, FusedOperators
from plait.runtime.executor.gpu.stream import DeviceWork, Stream
from plait.runtime.executor.torch_runner import TorchRunner

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

    `prepare()` returns token ids [tokens] and is the first part of the captured work; `layout` has the positions and
    the write slots that the graphs read. The trial runs of a capture write no KV if the write slots are negative.
    """

    def __init__(
        self,
        runner: TorchRunner,
        stream: Stream,
        buffers: PieceBuffers,
        tokens: int,
        prepare: Callable[[], torch.Tensor],
        layout: AttentionLayout,
    ) -> None:
        self._runner, self._buffers, self._tokens = runner, buffers, tokens
        self._prepare, self._layout = prepare, layout
        self._layers: list[AttentionLayer] = []
        self._replay = stream.capture_pieces(self._forward)
        self._attention = self._fused.bound_attention(self._layers)

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
            hidden = model.forward(self._prepare(), self._layout, self._runner.kv_cache)
        finally:
            model.kernels = kernels
        self._buffers.hidden[: self._tokens].copy_(hidden)
