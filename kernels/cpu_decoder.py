"""A whole decoder on a CPU with AVX-512 VNNI: packed weights, one call for a step.

A token's bits depend on its sequence alone: products within a block are exact whole numbers, everything else is
computed for each token by itself in a fixed order. So the same weights serve one row and a thousand.

Knows: packed weights, the layout of a batch. Must not know: files, names of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llvmlite.binding
import numba
import numpy as np
import torch

from plait.kernels import cpu_amx, cpu_room, cpu_share
from plait.kernels import cpu_step as step
from plait.kernels.cpu_packed import Packed, columns
from plait.kernels.cpu_parts import LANES, Heads, Rounded
from plait.kernels.cpu_plan import Plan
from plait.kernels.cpu_team import STRIDE
from plait.kernels.cpu_tile import WIDTH
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout

NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
EVERYTHING = 1 << 40  # a window that hides nothing


def missing_features() -> list[str]:
    """Instructions these kernels need and this CPU has not."""
    have = llvmlite.binding.get_host_cpu_features()
    return [name for name in NEEDED if not have.get(name)]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms float32 [C]; head_norms [(H + G) * D]; bias [(H + 2 G) * D]; gated as `alternating` has it."""

    norm: torch.Tensor
    qkv: Packed
    bias: torch.Tensor | None
    head_norms: torch.Tensor | None
    output: Packed
    post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gated: Packed
    down: Packed
    post_mlp_norm: torch.Tensor | None
    window: int | None
    rotation: int


@dataclass(frozen=True)
class DecoderWeights:
    """A model. `rotations`: cos and sin [context, D / 2] float32 of each rotary table."""

    embedding: Packed
    embedding_scale: float
    layers: Sequence[LayerWeights]
    norm: torch.Tensor
    head: Packed
    rotations: Sequence[tuple[torch.Tensor, torch.Tensor]]
    heads: Heads
    eps: float
    gate: int


class CpuDecoder:
    """`forward` and `logits` as `runtime.models.decoder.Decoder` has them; KV caches are bfloat16."""

    def __init__(self, weights: DecoderWeights, threads: int | None = None) -> None:
        self.weights = weights
        self.threads = min(threads or torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        self._tile_tokens = max(1, LANES // weights.heads.shared)
        self._head_plan = Plan(step.HEAD_ENTRIES)
        self._plan = self._fixed_plan()
        self._room_for = 0

    def forward(self, token_ids: torch.Tensor, layout: AttentionLayout, kv_cache: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states [T, C] float32 of token_ids [T], after the last norm; valid until the next call."""
        count, plan = len(token_ids), self._plan
        if count > self._room_for:
            self._make_state(count)
        for entry in self._state:
            plan.numbers[entry, 1] = count
        self._settings[0, step.PAGE_SHIFT] = layout.page_size.bit_length() - 1
        self._settings[0, step.CACHE] = kv_cache[0].k.data_ptr()
        self._settings[0, step.CACHE_STEP] = kv_cache[0].k.numel() * kv_cache[0].k.itemsize
        plan.put(step.TOKENS, token_ids.to(torch.int32).numpy())
        self._put_rows(layout)
        self._counters.fill(0)
        step.forward(plan.numbers, self.threads)
        return torch.from_numpy(self._state[step.NORMED][:count])

    def logits(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """[n, V] float32 for hidden [n, C]; with `ids` [k] only those tokens' logits, [n, k], of the same bits."""
        head = self.weights.head if ids is None else columns(self.weights.head, ids)
        count, channels = hidden.shape
        out = torch.empty((count, len(head.data) * WIDTH))
        plan = self._head_plan
        plan.put(step.HEAD_IN, hidden.contiguous().numpy())
        plan.put(step.HEAD_OUT, out.numpy())
        for i, array in enumerate(_rounded(count, channels)):
            plan.put(step.HEAD_ROUNDED + i, array)
        plan.put(step.HEAD_WEIGHT, head.data.numpy())
        plan.put(step.HEAD_COUNTERS, self._counters)
        self._counters.fill(0)
        step.project(plan.numbers, head.bits, self.threads)
        return out[:, : head.outputs]

    def _put_rows(self, layout: AttentionLayout) -> None:
        plan, q_starts = self._plan, layout.q_starts.numpy()
        plan.put(step.POSITIONS, layout.positions.numpy())
        plan.put(step.Q_STARTS, q_starts)
        plan.put(step.KV_STARTS, layout.kv_starts.numpy())
        plan.put(step.FIRST_PAGES, layout.first_pages.numpy())
        plan.put(step.PAGES, layout.kv_pages.numpy())
        plan.put(step.WRITES, layout.write_pages.numpy())
        most = int(q_starts[-1]) + len(q_starts)  # segments, and tiles
        plan.put(step.TILES, np.empty(most, np.int32))
        plan.put(step.SEGMENTS, np.empty(cpu_share.SEGMENT * most, np.int32))

    def _fixed_plan(self) -> Plan:
        """What stays the same from step to step."""
        weights, plan = self.weights, Plan(step.ENTRIES)
        heads = weights.heads
        self._counters = np.zeros((len(weights.layers) * step.PHASES + 2, 2 * STRIDE), np.int64)
        self._settings = np.zeros((1, step.NUM_SETTINGS), np.int64)
        self._settings[0, : step.PAGE_SHIFT] = (
            weights.embedding.bits,
            heads.shared,
            heads.groups,
            heads.size,
            weights.gate,
            self._tile_tokens,
        )
        plan.put(step.LAYERS, np.array([_columns(layer) for layer in weights.layers], dtype=np.int64))
        plan.put(step.LAST_NORM, weights.norm.numpy())
        plan.put(step.EMBEDDING, weights.embedding.data.numpy())
        for entry, i in ((step.COS, 0), (step.SIN, 1)):
            plan.put(entry, torch.stack([pair[i] for pair in weights.rotations]).contiguous().numpy())
        plan.put(step.SETTINGS, self._settings)
        for entry, value in (
            (step.EMBEDDING_SCALE, weights.embedding_scale),
            (step.SCORE_SCALE, heads.scale),
            (step.EPS, weights.eps),
        ):
            plan.put(entry, np.array([value], np.float64))
        plan.put(step.COUNTERS, self._counters)
        if cpu_amx.available():
            widest = max(weights.layers[0].down.inputs, weights.layers[0].output.inputs, weights.head.inputs)
            scratch = cpu_amx.scratch(self.threads, widest)
            plan.put(step.SCRATCH, scratch)
            self._head_plan.put(step.HEAD_SCRATCH, scratch)
        plan.put(step.ATTENTION, cpu_room.allocate(self.threads, self._tile_tokens * heads.shared, heads.size))
        plan.put(step.GATES, np.zeros((self.threads, step.GATE_ROWS * 2 * WIDTH), np.float32))
        return plan

    def _make_state(self, count: int) -> None:
        first, heads = self.weights.layers[0], self.weights.heads
        channels, wide = first.qkv.inputs, first.down.inputs
        self._state = {
            entry: np.zeros((count, width), np.float32)
            for entry, width in (
                (step.X, channels),
                (step.Y, channels),
                (step.NORMED, channels),
                (step.QKV_OUT, first.qkv.outputs),
            )
        }
        attended = heads.shared * heads.groups * heads.size
        for entry, width in ((step.HIDDEN, channels), (step.ATTENDED, attended), (step.INNER, wide)):
            self._state |= {entry + i: array for i, array in enumerate(_rounded(count, width))}
        for entry, array in self._state.items():
            self._plan.put(entry, array)
        self._room_for = count


def _rounded(rows: int, channels: int) -> Rounded:
    blocks = channels // 32
    return Rounded(
        np.zeros((rows, channels), np.int8),
        np.zeros((rows, blocks), np.float32),
        np.zeros((rows, blocks), np.float32),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _columns(layer: LayerWeights) -> list[int]:
    weights = [(each.address, each.bits) for each in (layer.qkv, layer.output, layer.gated, layer.down)]
    norms = (layer.norm, layer.post_norm, layer.mlp_norm, layer.post_mlp_norm, layer.head_norms, layer.bias)
    return [
        *(number for pair in weights for number in pair),
        *(_address(each) for each in norms),
        layer.window or EVERYTHING,
        layer.rotation,
    ]
