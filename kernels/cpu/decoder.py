"""A whole decoder on a CPU with AVX2 or AVX-512 VNNI: packed weights, one call for a step.

Products of few tokens are those of 8-bit numbers, exact within a block; of many, where the CPU has AMX, those of
bfloat16. Everything is computed for each token by itself in a fixed order, so a token's bits depend on its sequence
and on which of the two its step took; with `amx_min_tokens` None or 1 there is one, and they depend on its sequence alone.

Knows: packed weights, the layout of a batch. Must not know: files, names of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt

from plait.kernels.cpu import amx, isa
from plait.kernels.cpu import decoder_kernels as step
from plait.kernels.cpu.attention import kv_block, paged, tiling, workspace
from plait.kernels.cpu.gemm import amx_blocking
from plait.kernels.cpu.gemm.int8_kernel import INT8_ISA, TILE_OUTPUTS
from plait.kernels.cpu.gemm.packed_weights import PackedWeight, select_outputs
from plait.kernels.cpu.kernel_args import KernelArgs, aligned_empty
from plait.kernels.cpu.ops import MAX_TILE_LANES, HeadLayout, QuantizedActivations
from plait.kernels.cpu.threads import COUNTER_STRIDE
from plait.kernels.numpy_layout import NumpyAttentionLayout

REQUIRED_FEATURES = ("avx2", "fma", "f16c")
AMX_MIN_TOKENS = 12  # tokens of a step whose products are faster in bfloat16, AMX against AVX-512 VNNI
MIN_PARTITION_ROWS = 64  # at least: each strip widens all weights by itself
NO_WINDOW = 1 << 40  # a window that hides nothing
BF16_ENTRIES = [entry + step.BF16_TILES for entry in (step.HIDDEN, step.ATTENTION_OUT, step.MLP_INNER)]
MAX_BUFFERED_ROWS = 64  # rows of logits that are kept room for
NO_ARGMAX = np.empty((0, 2))
Floats = npt.NDArray[np.float32]
Cache = npt.NDArray[np.uint16]  # [layers, keys and values, slots, G, D]: the bits of bfloat16


def missing_features() -> list[str]:
    """Instructions these kernels need and this CPU has not, or numba is told not to use."""
    return [name for name in REQUIRED_FEATURES if not isa.has_features(name)]


def instruction_set() -> str:
    """What multiplies where none is missing, in words."""
    return f"{INT8_ISA.name} and AMX" if amx.available() else INT8_ISA.name


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16, whatever numba is told: torch asks."""
    have = llvmlite.binding.get_host_cpu_features()
    return bool(have.get("avx512bf16") or have.get("amx-bf16"))


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms float32 [C]; head_norms [(H + G) * D]; bias [(H + 2 G) * D]; gated as `alternating` has it."""

    norm: Floats
    qkv: PackedWeight
    bias: Floats | None
    head_norms: Floats | None
    output: PackedWeight
    post_norm: Floats | None
    mlp_norm: Floats
    gate_up: PackedWeight
    down: PackedWeight
    post_mlp_norm: Floats | None
    window: int | None
    rope_table: int


@dataclass(frozen=True)
class DecoderWeights:
    """A model. `rope_tables`: cos and sin [context, D / 2] float32 of each rotary table."""

    embedding: PackedWeight
    embedding_scale: float
    layers: Sequence[LayerWeights]
    norm: Floats
    head: PackedWeight
    rope_tables: Sequence[tuple[Floats, Floats]]
    heads: HeadLayout
    eps: float
    activation: int


class CpuDecoder:
    """`forward` and `logits` as `runtime.models.decoder.Decoder` has them, in arrays. `threads`: at most.

    `amx_min_tokens`: from how many tokens on products are in bfloat16, if the CPU has AMX; None: never.
    """

    def __init__(self, weights: DecoderWeights, threads: int, amx_min_tokens: int | None = AMX_MIN_TOKENS) -> None:
        self.weights = weights
        self._amx_min_tokens = amx_min_tokens if amx.available() else None
        self.threads = min(threads, numba.config.NUMBA_NUM_THREADS)
        self._tile_tokens = max(1, MAX_TILE_LANES // weights.heads.q_per_kv)
        self._head_args = KernelArgs(step.HEAD_ENTRIES)
        self._args = self._model_args()
        self._token_capacity = 0
        self._logits = aligned_empty((0, 0), np.float32)
        self._activations: QuantizedActivations | None = None

    def forward(self, token_ids: npt.NDArray[np.int32], layout: NumpyAttentionLayout, kv_cache: Cache) -> Floats:
        """Hidden states [T, C] float32 of token_ids [T], after the last norm; valid until the next call.

        Writes the keys and values of all tokens to the cache before it reads any.
        """
        count, args = len(token_ids), self._args
        if count > self._token_capacity:
            self._allocate_state(count)
        args.descriptors[self._state_entries, 1] = count
        if not self._uses_amx(count):
            args.descriptors[BF16_ENTRIES, 1] = 0
        self._settings[0, step.PAGE_SHIFT] = layout.page_size.bit_length() - 1
        self._settings[0, step.KV_CACHE] = kv_cache.ctypes.data
        self._settings[0, step.KV_CACHE_STRIDE] = kv_cache[0, 0].nbytes
        args.set(step.TOKENS, token_ids)
        self._set_batch(layout)
        num_partitions = self._num_partitions(count)
        self._settings[0, step.NUM_PARTITIONS] = num_partitions
        self._counters[:num_partitions].fill(0)
        step.forward(args.descriptors, self.threads)
        hidden: Floats = self._state[step.NORMED][:count]
        return hidden

    def argmax_tokens(self, hidden: Floats) -> npt.NDArray[np.float64]:
        """Of the logits of each row of hidden [n, C] the largest and the first place that has it, [n, 2].

        Not-a-number and any place where one is that.
        """
        argmax_out = np.empty((len(hidden), 2))
        self.logits(hidden, argmax_out=argmax_out)
        return argmax_out

    def logits(
        self,
        hidden: Floats,
        ids: npt.NDArray[np.int64] | None = None,
        argmax_out: npt.NDArray[np.float64] = NO_ARGMAX,
    ) -> Floats:
        """[n, V] float32 for hidden [n, C]; with `ids` [k] only those tokens' logits, [n, k], of the same bits.

        All logits are valid until the next call, and may be changed. `argmax_out`: see `argmax_tokens`.
        """
        head = self.weights.head if ids is None else select_outputs(self.weights.head, ids)
        count, channels = hidden.shape
        out = self._logits_buffer(count, len(head.data) * TILE_OUTPUTS)
        args = self._head_args
        args.set(step.HEAD_IN, np.ascontiguousarray(hidden))
        args.set(step.HEAD_OUT, out)
        for i, array in enumerate(self._activation_buffer(count, channels)):
            args.set(step.HEAD_ACTIVATIONS + i, array, count)
        if not self._uses_amx(count):
            args.descriptors[step.HEAD_ACTIVATIONS + step.BF16_TILES, 1] = 0
        args.set(step.HEAD_WEIGHT, head.data)
        args.set(step.HEAD_COUNTERS, self._counters)
        args.set(step.HEAD_ARGMAX, argmax_out)
        self._counters[0, : step.HEAD_PHASES].fill(0)  # the others' lines lie in other cores' caches
        step.compute_logits(args.descriptors, head.bits, head.outputs, self.threads)
        found: Floats = out[:, : head.outputs]
        return found

    def _logits_buffer(self, count: int, width: int) -> Floats:
        """The same memory again and again for as many rows as decode at once: fresh pages cost more than the search.

        Products in bfloat16 write as many rows as fill matrix registers.
        """
        if count > MAX_BUFFERED_ROWS:
            return aligned_empty((_padded_rows(count), width), np.float32)[:count]
        if width != self._logits.shape[1] or count > len(self._logits):
            self._logits = aligned_empty((_padded_rows(count), width), np.float32)
        return self._logits[:count]

    def _activation_buffer(self, count: int, channels: int) -> QuantizedActivations:
        """The same memory for what becomes of hidden states, too."""
        if count > MAX_BUFFERED_ROWS:
            return _allocate_activations(count, channels)
        if self._activations is None or count > len(self._activations.bf16_tiles):
            self._activations = _allocate_activations(count, channels)
        return self._activations

    def _uses_amx(self, count: int) -> bool:
        return self._amx_min_tokens is not None and count >= self._amx_min_tokens

    def _num_partitions(self, count: int) -> int:
        """Parts of a step's rows that threads take through a layer by themselves."""
        return max(1, min(self.threads, count // MIN_PARTITION_ROWS)) if self._uses_amx(count) else 1

    def _set_batch(self, layout: NumpyAttentionLayout) -> None:
        args, q_starts = self._args, layout.q_starts
        args.set(step.POSITIONS, layout.positions)
        args.set(step.Q_STARTS, q_starts)
        args.set(step.KV_STARTS, layout.kv_starts)
        args.set(step.FIRST_PAGES, layout.first_pages)
        args.set(step.PAGES, layout.kv_pages)
        args.set(step.WRITE_SLOTS, layout.write_slots)
        most = int(q_starts[-1]) + len(q_starts)  # segments, and tiles
        args.set(step.TILES, np.empty(most, np.int32))
        args.set(step.SEGMENTS, np.empty(tiling.SEGMENT_FIELDS * most, np.int32))
        args.set(step.SPLIT_STARTS, np.empty(most, np.int32))
        args.set(step.FINISHED_SPLITS, np.empty((most, self.weights.heads.num_kv_heads), np.int64))

    def _model_args(self) -> KernelArgs:
        """What stays the same from step to step."""
        weights, args = self.weights, KernelArgs(step.ENTRIES)
        heads = weights.heads
        capacity = workspace.capacity(self._tile_tokens * heads.q_per_kv, heads.num_kv_heads)
        num_phases = step.num_phases.py_func(len(weights.layers))
        self._counters = np.zeros((self.threads, num_phases, 2 * COUNTER_STRIDE), np.int64)
        self._settings = np.zeros((1, step.NUM_SETTINGS), np.int64)
        self._settings[0, : step.PAGE_SHIFT] = (
            weights.embedding.bits,
            heads.q_per_kv,
            heads.num_kv_heads,
            heads.head_dim,
            weights.activation,
            self._tile_tokens,
            capacity,
            kv_block.AMX if amx.available() else kv_block.BEST_WITHOUT_AMX,
        )
        args.set(step.LAYERS, np.array([_layer_args(layer) for layer in weights.layers], dtype=np.int64))
        args.set(step.FINAL_NORM, weights.norm)
        args.set(step.EMBEDDING, weights.embedding.data)
        for entry, i in ((step.COS, 0), (step.SIN, 1)):
            args.set(entry, np.stack([pair[i] for pair in weights.rope_tables]))
        args.set(step.SETTINGS, self._settings)
        for entry, value in (
            (step.EMBEDDING_SCALE, weights.embedding_scale),
            (step.SCORE_SCALE, heads.scale),
            (step.EPS, weights.eps),
        ):
            args.set(entry, np.array([value], np.float64))
        args.set(step.COUNTERS, self._counters)
        if amx.available():
            scratch = amx.allocate_scratch(self.threads, amx_blocking.SCRATCH_BYTES)
            args.set(step.AMX_SCRATCH, scratch)
            self._head_args.set(step.HEAD_AMX_SCRATCH, scratch)
        args.set(step.WORKSPACES, workspace.allocate(self.threads, capacity, heads.head_dim))
        args.set(step.PARTIALS, aligned_empty((1, paged.MAX_PARTIALS_BYTES), np.uint8))
        args.set(step.GATE_UP_BUFFERS, _zeros((self.threads, step.GATE_UP_ROWS * 2 * TILE_OUTPUTS), np.float32))
        return args

    def _allocate_state(self, count: int) -> None:
        first, heads = self.weights.layers[0], self.weights.heads
        channels, wide = first.qkv.inputs, first.down.inputs
        self._state = {
            entry: _zeros((_padded_rows(count), width), np.float32)
            for entry, width in (
                (step.RESIDUAL, channels),
                (step.BLOCK_OUT, channels),
                (step.NORMED, channels),
                (step.QKV_OUT, first.qkv.outputs),
            )
        }
        attended = heads.q_per_kv * heads.num_kv_heads * heads.head_dim
        for entry, width in ((step.HIDDEN, channels), (step.ATTENTION_OUT, attended), (step.MLP_INNER, wide)):
            self._state |= {entry + i: array for i, array in enumerate(_allocate_activations(count, width))}
        for entry, array in self._state.items():
            self._args.set(entry, array)
        self._state_entries = list(self._state)
        self._token_capacity = count


def _padded_rows(rows: int) -> int:
    """So many rows as fill matrix registers."""
    return rows + -rows % amx.TILE_ROWS


def _allocate_activations(rows: int, channels: int) -> QuantizedActivations:
    """Room for one of the two forms; numbers lie where the wide ones do."""
    rows = _padded_rows(rows)
    wide = _zeros((rows, channels), np.uint16)
    qvalues = wide.reshape(-1)[: wide.size // 2].view(np.int8).reshape(rows, channels)
    scales, sums = (_zeros((rows, channels // 32), np.float32) for _ in range(2))
    return QuantizedActivations(qvalues, scales, sums, wide)


def _zeros(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    array = aligned_empty(shape, dtype)
    array.fill(0)
    return array


def _address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _layer_args(layer: LayerWeights) -> list[int]:
    weights = [(each.address, each.bits) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    norms = (layer.norm, layer.post_norm, layer.mlp_norm, layer.post_mlp_norm, layer.head_norms, layer.bias)
    return [
        *(number for pair in weights for number in pair),
        *(_address(each) for each in norms),
        layer.window or NO_WINDOW,
        layer.rope_table,
    ]
