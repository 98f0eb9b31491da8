"""A whole decoder on a CPU with AVX-512 VNNI: packed weights, one call for a step.

Products of few tokens are those of 8-bit numbers, exact within a block; of many, where the CPU has AMX, those of
bfloat16. Everything is computed for each token by itself in a fixed order, so a token's bits depend on its sequence
and on which of the two its step took; with `wide_from=None` there is one, and they depend on its sequence alone.

Knows: packed weights, the layout of a batch. Must not know: files, names of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch

from plait.kernels import cpu_amx, cpu_panel
from plait.kernels import cpu_step as step
from plait.kernels.cpu_packed import Packed, columns
from plait.kernels.cpu_parts import KEYS, LANES, Heads, Rounded
from plait.kernels.cpu_plan import Plan
from plait.kernels.cpu_team import STRIDE
from plait.kernels.cpu_tile import WIDTH
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout

NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
WIDE_FROM = 12  # tokens of a step whose products are faster in bfloat16, AVX-512 VNNI against AMX
EVERYTHING = 1 << 40  # a window that hides nothing
WIDE_ENTRIES = [entry + step.WIDE for entry in (step.HIDDEN, step.ATTENDED, step.INNER)]


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

    def __init__(self, weights: DecoderWeights, threads: int | None = None, wide_from: int | None = WIDE_FROM) -> None:
        """`wide_from`: from how many tokens on products are in bfloat16, if the CPU has AMX; None: never."""
        self.weights = weights
        self._wide_from = wide_from if cpu_amx.available() else None
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
        if not self._is_wide(count):
            plan.numbers[WIDE_ENTRIES, 1] = 0
        self._settings[0, step.PAGE_SHIFT] = layout.page_size.bit_length() - 1
        self._settings[0, step.CACHE] = kv_cache[0].k.data_ptr()
        self._settings[0, step.CACHE_STEP] = kv_cache[0].k.numel() * kv_cache[0].k.itemsize
        plan.put(step.TOKENS, token_ids.to(torch.int32).numpy())
        self._put_rows(layout)
        self._counters.fill(0)
        step.forward(plan.numbers, self.threads)
        return torch.from_numpy(self._state[step.NORMED][:count])

    def logits(self, hidden: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """[n, V] float32 for hidden [n, C]; with `ids` [k] only those tokens' logits, [n, k], of the same bits.

        Products in bfloat16 write up to 15 rows more, which lie behind the result in memory.
        """
        head = self.weights.head if ids is None else columns(self.weights.head, ids)
        count, channels = hidden.shape
        out = torch.empty((_filled(count) if self._is_wide(count) else count, len(head.data) * WIDTH))
        plan = self._head_plan
        plan.put(step.HEAD_IN, hidden.contiguous().numpy())
        plan.put(step.HEAD_OUT, out.numpy())
        for i, array in enumerate(_rounded(count, channels)):
            plan.put(step.HEAD_ROUNDED + i, array, count)
        if not self._is_wide(count):
            plan.numbers[step.HEAD_ROUNDED + step.WIDE, 1] = 0
        plan.put(step.HEAD_WEIGHT, head.data.numpy())
        plan.put(step.HEAD_COUNTERS, self._counters)
        self._counters.fill(0)
        step.project(plan.numbers, head.bits, self.threads)
        return out[:count, : head.outputs]

    def _is_wide(self, count: int) -> bool:
        return self._wide_from is not None and count >= self._wide_from

    def _put_rows(self, layout: AttentionLayout) -> None:
        plan, q_starts = self._plan, layout.q_starts.numpy()
        per_row = -(-np.diff(q_starts) // self._tile_tokens)
        tile_rows = np.repeat(np.arange(len(per_row), dtype=np.int32), per_row)
        before = np.repeat(np.cumsum(per_row) - per_row, per_row)
        firsts = ((np.arange(len(tile_rows)) - before) * self._tile_tokens).astype(np.int32)
        plan.put(step.POSITIONS, layout.positions.numpy())
        plan.put(step.Q_STARTS, q_starts)
        plan.put(step.KV_STARTS, layout.kv_starts.numpy())
        plan.put(step.FIRST_PAGES, layout.first_pages.numpy())
        plan.put(step.PAGES, layout.kv_pages.numpy())
        plan.put(step.WRITES, layout.write_pages.numpy())
        plan.put(step.TILE_ROWS, tile_rows)
        plan.put(step.TILE_FIRSTS, firsts)

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
        lanes, size = -(-self._tile_tokens * heads.shared // cpu_amx.ROWS) * cpu_amx.ROWS, heads.size
        if cpu_amx.available():
            first = weights.layers[0]
            widest = max(first.down.inputs, first.output.inputs, 2 * first.gated.inputs, weights.head.inputs)
            scratch = cpu_amx.scratch(self.threads, cpu_panel.panel_bytes(widest), lanes, size)
            plan.put(step.SCRATCH, scratch)
            self._head_plan.put(step.HEAD_SCRATCH, scratch)
        widths = (size * KEYS, size * KEYS, lanes * size, lanes * size, 4 * KEYS, lanes, lanes)
        for entry, width in zip(range(step.KEYS, step.PLACES), widths, strict=True):
            plan.put(entry, _floats(self.threads, width))
        plan.put(step.PLACES, np.zeros((self.threads, 4 * KEYS), np.int64))
        plan.put(step.GATES, _floats(self.threads, step.GATE_ROWS * 2 * WIDTH))
        return plan

    def _make_state(self, count: int) -> None:
        first, heads = self.weights.layers[0], self.weights.heads
        channels, wide = first.qkv.inputs, first.down.inputs
        self._state = {
            entry: _floats(_filled(count), width)
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


def _filled(rows: int) -> int:
    """So many rows as fill matrix registers."""
    return rows + -rows % cpu_amx.ROWS


def _floats(rows: int, width: int) -> np.ndarray[Any, Any]:
    """Zeros [rows, width] in whole cache lines, as torch allocates them: registers load others at half the speed."""
    return torch.zeros((rows, width)).numpy()


def _rounded(rows: int, channels: int) -> Rounded:
    """Room for one of the two forms; numbers lie where the wide ones do."""
    rows = _filled(rows)
    wide = torch.zeros((rows, channels), dtype=torch.uint16).numpy()
    numbers = wide.reshape(-1)[: rows * channels // 2].view(np.int8).reshape(rows, channels)
    scales, sums = (_floats(rows, channels // 32) for _ in range(2))
    return Rounded(numbers, scales, sums, wide)


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
