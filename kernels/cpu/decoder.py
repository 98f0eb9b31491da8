"""A whole decoder on a CPU with AVX2 or AVX-512 VNNI: packed weights, one call of a compiled kernel for each step.

Steps with few tokens multiply in int8, with exact integer sums over blocks of 32 channels. On a CPU with AMX, steps
with many tokens multiply in bfloat16. Every token is computed separately and in a fixed order, so its bits depend only
on its sequence and on which of the two its step used; with `amx_min_tokens` None or 1, all steps use the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt

from plait.kernels.cpu import amx, decoder_kernels, isa
from plait.kernels.cpu import decoder_args as arg
from plait.kernels.cpu.attention import paged, tiling, workspace
from plait.kernels.cpu.attention.isa import best_isa
from plait.kernels.cpu.decoder_weights import DecoderWeights, Floats, layer_args, weight_part
from plait.kernels.cpu.gemm import amx_blocking
from plait.kernels.cpu.gemm.experts import GROUP, NUM_PHASES
from plait.kernels.cpu.gemm.int8_blocks import INT8_ISA
from plait.kernels.cpu.gemm.layouts import QUANT_BLOCK, TILE_OUTPUTS
from plait.kernels.cpu.gemm.packed_weights import select_outputs
from plait.kernels.cpu.kernel_args import KernelArgs, aligned_empty, aligned_zeros
from plait.kernels.cpu.kernel_types import QuantizedActivations
from plait.kernels.cpu.low_rank.adapters import CpuAdapters
from plait.kernels.cpu.parallel.threads import COUNTER_STRIDE
from plait.kernels.numpy_layout import NumpyAttentionLayout

REQUIRED_FEATURES = ("avx2", "fma", "f16c")
AMX_MIN_TOKENS = 12  # tokens of a step from which AMX in bfloat16 is faster than AVX-512 VNNI
MIN_PARTITION_ROWS = 64  # minimum rows of a partition: each partition dequantizes all weights
BF16_ENTRIES = [entry + arg.BF16_TILES for entry in (arg.HIDDEN, arg.ATTENTION_OUT, arg.MLP_INNER)]
MAX_BUFFERED_ROWS = 64  # rows of logits for which memory is kept between calls
NO_ARGMAX, NO_SLOTS, NO_TERMS = np.empty((0, 2)), np.empty(0, np.int32), np.empty((0, 1), np.float32)
Slots = npt.NDArray[np.int32]
Cache = npt.NDArray[np.uint16] | npt.NDArray[np.uint8]
"""The KV cache: bits of bfloat16, uint16 [layers, 2, slots, G, D], or int8 with scales, uint8 [layers, 2, slots,
`int8_slot_bytes`]. The second axis has keys and values."""


def missing_features() -> list[str]:
    """Returns the required CPU features that are missing, or that PLAIT_ISA leaves out."""
    return [name for name in REQUIRED_FEATURES if not isa.has_features(name)]


def int8_slot_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Returns the bytes of a token's keys (or values) in int8: [G, D] and one float32 scale for each head."""
    return num_kv_heads * (head_dim + 4)


def instruction_set() -> str:
    """Returns the name of the instructions for matrix products, for messages. Requires that no feature is missing."""
    return f"{INT8_ISA.name} and AMX" if amx.available() else INT8_ISA.name


def has_bfloat16() -> bool:
    """Returns whether this CPU has bfloat16 products, for the torch backend; ignores PLAIT_ISA."""
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512bf16") or features.get("amx-bf16"))


class CpuDecoder:
    """Runs `forward` and `logits` of `runtime.models.decoder.Decoder` on numpy arrays, with at most `threads` threads.

    `amx_min_tokens`: steps with at least so many tokens multiply in bfloat16 if the CPU has AMX; None: no step does.
    """

    def __init__(self, weights: DecoderWeights, threads: int, amx_min_tokens: int | None = AMX_MIN_TOKENS) -> None:
        self.weights = weights
        self._amx_min_tokens = amx_min_tokens if amx.available() else None
        self.threads = threads
        self._tile_tokens = max(1, tiling.MAX_TILE_LANES // weights.heads.q_per_kv)
        self._head_args = KernelArgs(arg.HEAD_ENTRIES)
        self._head_settings = np.zeros((1, arg.NUM_HEAD_SETTINGS), np.int64)
        self._head_args.set(arg.HEAD_SETTINGS, self._head_settings)
        self._head_args.set(arg.HEAD_SOFT_CAP, np.array([weights.logit_softcap], np.float64))
        self._expert_entries: list[int] = []  # entries of buffers with a row for each pair of token and chosen expert
        self._adapters: CpuAdapters | None = None
        self._num_terms = 0  # of a row's buffer
        self._num_captured = self._num_tokens = 0  # layers whose input is captured; tokens of the latest step
        self._captured_entries: list[int] = []  # where `captured` is
        self._args = self._model_args()
        self._token_capacity = 0
        self._logits = aligned_empty((0, 0), np.float32)
        self._activations: QuantizedActivations | None = None

    def set_adapters(self, adapters: CpuAdapters) -> None:
        """Sets the adapters that rows may have. Their slots may be filled later, between steps."""
        self._adapters, self._token_capacity = adapters, 0
        self._args.set(arg.ADAPTER_TABLE, adapters.table)
        self._head_args.set(arg.HEAD_ADAPTER_TABLE, adapters.table)

    def capture(self, layers: Sequence[int]) -> None:
        """Keeps the inputs of these layers, in ascending order, in further steps: see `captured`.

        The number behind the last layer stands for that layer's output.
        """
        inputs = [index for index in layers if index < len(self.weights.layers)]
        for place, index in enumerate(inputs):
            self._layer_table[index, arg.CAPTURE] = place + 1
        self._num_captured, self._token_capacity = len(inputs), 0
        self._captured_entries = [arg.CAPTURED] * bool(inputs) + [arg.RESIDUAL] * (len(layers) - len(inputs))

    @property
    def captured(self) -> Floats:
        """The residual stream before each layer of `capture`, float32 [T, layers * C] of the latest step's tokens.

        Valid until the next step.
        """
        states: list[Floats] = [self._buffers[entry][: self._num_tokens] for entry in self._captured_entries]
        return states[0] if len(states) == 1 else np.concatenate(states, axis=1)

    def num_outputs(self) -> list[tuple[int, ...]]:
        """The outputs of each layer's products and of those behind them, in the order of `kernel_types`."""
        of_layers: list[tuple[int, ...]] = [
            (
                sum(part.outputs for part in layer.qkv),
                layer.output.outputs,
                layer.gate_up.first.outputs + layer.gate_up.second.outputs,
                layer.down.outputs,
            )
            for layer in self.weights.layers
        ]
        return [*of_layers, (self.weights.head.outputs, self.weights.embedding.inputs)]

    def forward(
        self,
        token_ids: npt.NDArray[np.int32],
        layout: NumpyAttentionLayout,
        kv_cache: Cache,
        adapter_slots: Slots | None = None,
    ) -> Floats:
        """Returns the hidden states after the final norm, float32 [T, C], of token_ids [T]; valid until the next call.

        Each layer writes the keys and values of all tokens to the cache before it reads any. adapter_slots [T]: the
        index of each token's adapter, -1: none; None: no token has one. Steps with adapters multiply in int8.
        """
        count, args = len(token_ids), self._args
        self._num_tokens = count
        if count > self._token_capacity or (self._adapters is not None and self._adapters.num_terms > self._num_terms):
            self._allocate_buffers(max(count, self._token_capacity))
        args.descriptors[self._buffer_entries, 1] = count
        uses_amx = self._uses_amx(count) and adapter_slots is None
        if not uses_amx:
            args.descriptors[BF16_ENTRIES, 1] = 0
        args.set(arg.ADAPTER_SLOTS, NO_SLOTS if adapter_slots is None else adapter_slots)
        self._settings[0, arg.PAGE_SHIFT] = layout.page_size.bit_length() - 1
        self._settings[0, arg.KV_CACHE] = kv_cache.ctypes.data
        self._settings[0, arg.KV_CACHE_STRIDE] = kv_cache[0, 0].nbytes
        self._settings[0, arg.KV_SLOT_BYTES] = kv_cache[0, 0, 0].nbytes
        heads = self.weights.heads
        has_int8_cache = kv_cache.dtype == np.uint8
        self._settings[0, arg.KV_SCALES] = heads.num_kv_heads * heads.head_dim if has_int8_cache else 0
        self._settings[0, arg.ATTENTION_ISA] = best_isa(has_int8_cache)
        args.set(arg.TOKENS, token_ids)
        self._set_batch(layout)
        num_partitions = self._num_partitions(count) if uses_amx else 1
        self._settings[0, arg.NUM_PARTITIONS] = num_partitions
        self._counters[:num_partitions].fill(0)
        if self._expert_entries:
            args.descriptors[self._expert_entries, 1] = count * self._experts_per_token
            self._expert_counters[:num_partitions].fill(0)
        decoder_kernels.forward(args.descriptors, self.threads)
        hidden: Floats = self._buffers[arg.NORMED][:count]
        return hidden

    def argmax_tokens(self, hidden: Floats, adapter_slots: Slots | None = None) -> npt.NDArray[np.float64]:
        """Returns float64 [n, 2] for hidden [n, C]: the largest logit of each row, and its first index.

        A row with NaN has NaN and any index.
        """
        argmax_out = np.empty((len(hidden), 2))
        self.logits(hidden, None, argmax_out, adapter_slots)
        return argmax_out

    def logits(
        self,
        hidden: Floats,
        ids: npt.NDArray[np.int64] | None = None,
        argmax_out: npt.NDArray[np.float64] = NO_ARGMAX,
        adapter_slots: Slots | None = None,
    ) -> Floats:
        """Returns the logits float32 [n, V] of hidden [n, C], valid until the next call; the caller may change them.

        With `ids` [k], computes only the logits of these tokens, [n, k], with the same bits. `argmax_out` receives the
        result of `argmax_tokens`. adapter_slots [n]: as in `forward`.
        """
        changes_head = self._adapters is not None and self._adapters.change_head(adapter_slots)
        if ids is not None and changes_head:
            return self.logits(hidden, adapter_slots=adapter_slots)[:, ids]
        head = self.weights.head if ids is None else select_outputs(self.weights.head, ids)
        count, channels = hidden.shape
        out = self._logits_buffer(count, len(head.data) * TILE_OUTPUTS)
        args = self._head_args
        scale = np.float32(self.weights.logit_scale)
        args.set(arg.HEAD_IN, np.ascontiguousarray(hidden if scale == 1 else hidden * scale))
        args.set(arg.HEAD_OUT, out)
        for i, array in enumerate(self._activation_buffer(count, channels)):
            args.set(arg.HEAD_ACTIVATIONS + i, array, count)
        args.set(arg.HEAD_ADAPTER_SLOTS, adapter_slots if changes_head and adapter_slots is not None else NO_SLOTS)
        terms = aligned_empty((count, self._num_terms), np.float32) if changes_head else NO_TERMS
        args.set(arg.HEAD_ADAPTER_TERMS, terms)
        if changes_head or not self._uses_amx(count):
            args.descriptors[arg.HEAD_ACTIVATIONS + arg.BF16_TILES, 1] = 0
        args.set(arg.HEAD_COUNTERS, self._counters)
        args.set(arg.HEAD_ARGMAX, argmax_out)
        self._counters[0, : arg.HEAD_PHASES].fill(0)  # writing the others too would evict them from other cores' caches
        self._head_settings[0] = *weight_part(head), head.outputs, len(self.weights.layers)
        decoder_kernels.compute_logits(args.descriptors, self.threads)
        logits: Floats = out[:, : head.outputs]
        return logits

    def _logits_buffer(self, count: int, width: int) -> Floats:
        """Returns memory for logits. Few rows reuse one buffer, because fresh memory pages cost more than the argmax.

        Rows are padded to a multiple of the AMX tile, which bfloat16 products write.
        """
        if count > MAX_BUFFERED_ROWS:
            return aligned_empty((_padded_rows(count), width), np.float32)[:count]
        if width != self._logits.shape[1] or count > len(self._logits):
            self._logits = aligned_empty((_padded_rows(count), width), np.float32)
        return self._logits[:count]

    def _activation_buffer(self, count: int, channels: int) -> QuantizedActivations:
        """Returns memory for the quantized hidden states, reused between calls like that of the logits."""
        if count > MAX_BUFFERED_ROWS:
            return _allocate_activations(count, channels)
        if self._activations is None or count > len(self._activations.bf16_tiles):
            self._activations = _allocate_activations(count, channels)
        return self._activations

    def _uses_amx(self, count: int) -> bool:
        return self._amx_min_tokens is not None and count >= self._amx_min_tokens

    def _num_partitions(self, count: int) -> int:
        """Returns the number of row partitions of a step without adapters (`row_partition`)."""
        return max(1, min(self.threads, count // MIN_PARTITION_ROWS)) if self._uses_amx(count) else 1

    def _set_batch(self, layout: NumpyAttentionLayout) -> None:
        args, q_starts = self._args, layout.q_starts
        args.set(arg.POSITIONS, layout.positions)
        args.set(arg.Q_STARTS, q_starts)
        args.set(arg.KV_STARTS, layout.kv_starts)
        args.set(arg.FIRST_PAGES, layout.first_pages)
        args.set(arg.PAGES, layout.kv_pages)
        args.set(arg.WRITE_SLOTS, layout.write_slots)
        max_segments = int(q_starts[-1]) + len(q_starts)  # also an upper bound of the number of tiles
        args.set(arg.TILES, np.empty(max_segments, np.int32))
        args.set(arg.SEGMENTS, np.empty(tiling.SEGMENT_FIELDS * max_segments, np.int32))
        args.set(arg.SPLIT_STARTS, np.empty(max_segments, np.int32))
        args.set(arg.FINISHED_SPLITS, np.empty((max_segments, self.weights.heads.num_kv_heads), np.int64))

    def _model_args(self) -> KernelArgs:
        """Returns the kernel arguments, with the entries set that are the same in every step."""
        weights, args = self.weights, KernelArgs(arg.ENTRIES)
        heads = weights.heads
        capacity = workspace.capacity(self._tile_tokens * heads.q_per_kv, heads.num_kv_heads)
        num_phases = arg.num_phases(len(weights.layers))
        self._counters = np.zeros((self.threads, num_phases, 2 * COUNTER_STRIDE), np.int64)
        self._settings = np.zeros((1, arg.NUM_SETTINGS), np.int64)
        self._settings[0, : arg.PAGE_SHIFT] = (
            heads.q_per_kv,
            heads.num_kv_heads,
            heads.head_dim,
            weights.activation,
            self._tile_tokens,
            capacity,
            0 if weights.experts is None else weights.experts.num_experts,
            0 if weights.experts is None else weights.experts.normalize_topk,
            weights.joint_head_norms,
        )
        self._set_expert_args(args)
        self._layer_table = np.array([layer_args(layer) for layer in weights.layers], dtype=np.int64)
        args.set(arg.LAYERS, self._layer_table)
        args.set(arg.FINAL_NORM, weights.norm)
        args.set(arg.EMBEDDING, np.array([weight_part(weights.embedding)], np.int64))
        for entry, i in ((arg.COS, 0), (arg.SIN, 1)):
            args.set(entry, np.stack([pair[i] for pair in weights.rope_tables]))
        args.set(arg.SETTINGS, self._settings)
        for entry, value in (
            (arg.EMBEDDING_SCALE, weights.embedding_scale),
            (arg.SCORE_SCALE, heads.scale),
            (arg.SOFT_CAP, heads.softcap),
            (arg.EPS, weights.eps),
        ):
            args.set(entry, np.array([value], np.float64))
        args.set(arg.COUNTERS, self._counters)
        if amx.available():
            scratch = amx.allocate_scratch(self.threads, amx_blocking.SCRATCH_BYTES)
            args.set(arg.AMX_SCRATCH, scratch)
            self._head_args.set(arg.HEAD_AMX_SCRATCH, scratch)
        args.set(arg.WORKSPACES, workspace.allocate(self.threads, capacity, heads.head_dim))
        args.set(arg.PARTIALS, aligned_empty((1, paged.MAX_PARTIALS_BYTES), np.uint8))
        args.set(
            arg.GATE_UP_BUFFERS,
            aligned_zeros((self.threads, decoder_kernels.GATE_UP_ROWS * 2 * TILE_OUTPUTS), np.float32),
        )
        return args

    def _allocate_buffers(self, count: int) -> None:
        """Allocates the buffers of a step for up to `count` tokens."""
        first, heads = self.weights.layers[0], self.weights.heads
        channels = first.qkv[0].inputs
        mlp_channels = max(
            (layer.down.inputs for layer in self.weights.layers if layer.router is None), default=QUANT_BLOCK
        )
        self._buffers = {
            entry: aligned_zeros((_padded_rows(count), width), np.float32)
            for entry, width in (
                (arg.RESIDUAL, channels),
                (arg.BLOCK_OUT, channels),
                (arg.NORMED, channels),
                (arg.QKV_OUT, sum(part.outputs for part in first.qkv)),
            )
        }
        attention_channels = heads.q_per_kv * heads.num_kv_heads * heads.head_dim
        for entry, width in (
            (arg.HIDDEN, channels),
            (arg.ATTENTION_OUT, attention_channels),
            (arg.MLP_INNER, mlp_channels),
        ):
            self._buffers |= {entry + i: array for i, array in enumerate(_allocate_activations(count, width))}
        self._buffers |= self._expert_buffers_of_tokens(count)
        if self._num_captured:
            self._buffers[arg.CAPTURED] = aligned_zeros((count, self._num_captured * channels), np.float32)
        if self._adapters is not None:
            self._num_terms = self._adapters.num_terms
            self._buffers[arg.ADAPTER_TERMS] = aligned_zeros((count, self._num_terms), np.float32)
        self._buffer_entries = list(self._buffers)
        pair_buffers = self._expert_buffers_of_pairs(count)
        self._expert_entries = list(pair_buffers)
        for entry, array in (*self._buffers.items(), *pair_buffers.items()):
            self._args.set(entry, array)
        self._token_capacity = count

    def _set_expert_args(self, args: KernelArgs) -> None:
        """Sets the entries of the experts that are the same in every step."""
        experts, num_layers = self.weights.experts, len(self.weights.layers)
        self._experts_per_token = 0 if experts is None else experts.experts_per_token
        if experts is not None:
            self._expert_counters = np.zeros((self.threads, num_layers * NUM_PHASES, 2 * COUNTER_STRIDE), np.int64)
            args.set(arg.EXPERT_COUNTERS, self._expert_counters)
            args.set(arg.GROUPS, np.zeros((self.threads * num_layers, 2 * experts.num_experts + 1), np.int32))

    def _expert_buffers_of_tokens(self, count: int) -> dict[int, npt.NDArray[Any]]:
        """Returns the buffers of `ExpertBuffers` with a row for each token."""
        experts = self.weights.experts
        if experts is None:
            return {}
        chosen = (count, experts.experts_per_token)
        return {
            arg.SCORES: aligned_zeros((count, experts.num_experts + -experts.num_experts % GROUP), np.float32),
            arg.CHOSEN: np.zeros(chosen, np.int32),
            arg.WEIGHTS: np.zeros(chosen, np.float32),
            arg.PLACES: np.zeros(chosen, np.int32),
        }

    def _expert_buffers_of_pairs(self, count: int) -> dict[int, npt.NDArray[Any]]:
        """Returns the buffers of `ExpertBuffers` with a row for each pair of token and chosen expert, in int8 only."""
        layer = next((layer for layer in self.weights.layers if layer.router is not None), None)
        if layer is None:
            return {}
        rows, channels = count * self._experts_per_token, layer.qkv[0].inputs
        buffers: dict[int, npt.NDArray[Any]] = {arg.EXPERT_OUT: aligned_zeros((rows, channels), np.float32)}
        for entry, width in ((arg.EXPERT_INPUTS, channels), (arg.EXPERT_INNER, layer.down.inputs)):
            buffers |= {entry + i: array for i, array in enumerate(_allocate_int8_activations(rows, width))}
        return buffers


def _padded_rows(rows: int) -> int:
    """Returns `rows` rounded up to a multiple of the rows of an AMX tile."""
    return rows + -rows % amx.TILE_ROWS


def _allocate_activations(rows: int, channels: int) -> QuantizedActivations:
    """Returns memory for activations in int8 or bfloat16, which share the memory of the values."""
    rows = _padded_rows(rows)
    bf16_tiles = aligned_zeros((rows, channels), np.uint16)
    quants = bf16_tiles.reshape(-1)[: bf16_tiles.size // 2].view(np.int8).reshape(rows, channels)
    scales, block_sums = (aligned_zeros((rows, channels // QUANT_BLOCK), np.float32) for _ in range(2))
    return QuantizedActivations(quants, scales, block_sums, aligned_zeros(scales.shape, np.int32), bf16_tiles)


def _allocate_int8_activations(rows: int, channels: int) -> list[npt.NDArray[Any]]:
    """Returns memory for all fields of `QuantizedActivations` except the last, `bf16_tiles`."""
    scales, block_sums = (aligned_zeros((rows, channels // QUANT_BLOCK), np.float32) for _ in range(2))
    return [aligned_zeros((rows, channels), np.int8), scales, block_sums, aligned_zeros(scales.shape, np.int32)]
