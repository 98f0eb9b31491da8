"""A decoder's whole step in one parallel region: the order of its phases, and the output head's.

Knows: the phases, and where a model's weights lie. Must not know: files, torch, sessions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels.cpu import amx
from plait.kernels.cpu.attention.paged import AttentionSchedule, attend, choose_schedule
from plait.kernels.cpu.attention.tiling import build_tiles, count_splits
from plait.kernels.cpu.attention.traversal import LayerKvCache
from plait.kernels.cpu.compile_cache import SOURCE_HASH, cached_njit
from plait.kernels.cpu.gemm.int8_kernel import HALF_TILE, QUANT_BLOCK, TILE_OUTPUTS
from plait.kernels.cpu.gemm.packed_linear import gate_up_linear, linear
from plait.kernels.cpu.kernel_args import (
    float32_matrix,
    float64_matrix,
    int8_matrix,
    int32_vector,
    int64_matrix,
    scalar,
    uint16_matrix,
)
from plait.kernels.cpu.ops import (
    AttentionBatch,
    HeadLayout,
    QuantizedActivations,
    ThreadContext,
    add_rms_norm,
    apply_rope_and_write_kv,
    items_per_claim,
    quantize_blocks,
)
from plait.kernels.cpu.row_argmax import row_argmax
from plait.kernels.cpu.row_partition import (
    PASS_ROWS,
    StepBuffers,
    partition_batch,
    partition_bounds,
    partition_buffers,
    partition_context,
)
from plait.kernels.cpu.threads import barrier_wait, claim_work, mark_done
from plait.kernels.cpu.vector_ops import address_of, half_to_float

GATE_UP_ROWS = PASS_ROWS  # rows of gate and up that are held before they are multiplied

# Columns of `Model.layers`: addresses (0: there is none), bits, and numbers of one layer.
QKV, QKV_BITS, OUTPUT, OUTPUT_BITS, GATE_UP, GATE_UP_BITS, DOWN, DOWN_BITS = range(8)
NORM, POST_NORM, MLP_NORM, POST_MLP_NORM, HEAD_NORMS, BIAS, WINDOW, ROPE_TABLE = range(8, 16)
COLUMNS = 16
PHASES = 8  # of one layer, the fourth being attention, which the first strip counts for all


# Entries of the plan. A step's own:
TOKENS, POSITIONS, Q_STARTS, KV_STARTS, FIRST_PAGES, PAGES, WRITE_SLOTS, TILES, SEGMENTS = range(9)
RESIDUAL, BLOCK_OUT, NORMED, QKV_OUT = range(9, 13)
HIDDEN, ATTENTION_OUT, MLP_INNER = 13, 17, 21  # of four entries each: numbers, scales, sums, wide
BF16_TILES = 3  # the last of the four
# The model's:
LAYERS, FINAL_NORM, EMBEDDING, COS, SIN, SETTINGS, EMBEDDING_SCALE, SCORE_SCALE, EPS = range(25, 34)
# The threads', each array's row being one thread's:
WORKSPACES, GATE_UP_BUFFERS, COUNTERS, AMX_SCRATCH = range(34, 38)
# Attention's parts of a step:
SPLIT_STARTS, PARTIALS, FINISHED_SPLITS = range(38, 41)
ENTRIES = 41
# Columns of SETTINGS:
(
    EMBEDDING_BITS,
    Q_PER_KV,
    NUM_KV_HEADS,
    HEAD_DIM,
    ACTIVATION,
    TILE_TOKENS,
    WORKSPACE_LANES,
    ATTENTION_ISA,
    PAGE_SHIFT,
    KV_CACHE,
    KV_CACHE_STRIDE,
) = range(11)
NUM_TILES, NUM_PARTITIONS, SPLIT_KV, KV_HEADS_PER_ITEM, TILE_LANES = range(11, 16)
NUM_SETTINGS = 16


@numba.njit  # type: ignore[untyped-decorator]
def num_phases(layers: int) -> int:
    """Of one strip: the embedding, each layer's, the last norm."""
    return 2 + PHASES * layers


@numba.njit  # type: ignore[untyped-decorator]
def _thread_context(thread_id: int, threads: int, args: Any, counters: int, scratch: int) -> ThreadContext:
    address = args[scratch, 0]
    place: Any = np.int64(
        thread_id
    )  # an unsigned index in a parallel loop: all that takes a Team would be compiled again
    return ThreadContext(place, threads, args[counters, 0], address + place * args[scratch, 2] if address else 0)


@numba.njit  # type: ignore[untyped-decorator]
def _activations(args: Any, entry: int) -> Any:
    return QuantizedActivations(
        int8_matrix(args, entry),
        float32_matrix(args, entry + 1),
        float32_matrix(args, entry + 2),
        uint16_matrix(args, entry + BF16_TILES),
    )


@numba.njit  # type: ignore[untyped-decorator]
def _heads(args: Any, settings: Any) -> HeadLayout:
    return HeadLayout(settings[Q_PER_KV], settings[NUM_KV_HEADS], settings[HEAD_DIM], scalar(args, SCORE_SCALE))


@numba.njit  # type: ignore[untyped-decorator]
def _schedule_attention(args: Any, threads: int) -> None:
    """What attention's items are in this step, in each of its layers."""
    settings, split_starts = int64_matrix(args, SETTINGS)[0], int32_vector(args, SPLIT_STARTS)
    q_starts, kv_starts, tiles, segments = (
        int32_vector(args, Q_STARTS), int32_vector(args, KV_STARTS), int32_vector(args, TILES), int32_vector(args, SEGMENTS),
    )  # fmt: skip
    tiles_of = int32_vector(args, FIRST_PAGES), int32_vector(args, PAGES), settings[PAGE_SHIFT], settings[TILE_TOKENS]
    num_tiles = build_tiles(q_starts, kv_starts, *tiles_of, tiles, segments)
    tokens, most_splits = count_splits(q_starts, kv_starts, num_tiles, tiles, segments, split_starts)
    settings[NUM_TILES], settings[TILE_LANES] = num_tiles, tokens * settings[Q_PER_KV]
    heads = _heads(args, settings)
    split_kv, kv_heads_per_item = choose_schedule(
        num_tiles, np.int64(split_starts[num_tiles]), most_splits, tokens * heads.q_per_kv, heads, threads
    )
    settings[SPLIT_KV], settings[KV_HEADS_PER_ITEM] = split_kv, kv_heads_per_item
    int64_matrix(args, FINISHED_SPLITS)[:] = 0


@numba.njit  # type: ignore[untyped-decorator]
def _run_thread(team: ThreadContext, args: Any) -> None:
    settings = int64_matrix(args, SETTINGS)[0]
    heads = _heads(args, settings)
    state = StepBuffers(
        float32_matrix(args, RESIDUAL),
        float32_matrix(args, BLOCK_OUT),
        float32_matrix(args, NORMED),
        float32_matrix(args, QKV_OUT),
        _activations(args, HIDDEN),
        _activations(args, ATTENTION_OUT),
        _activations(args, MLP_INNER),
    )
    rows = AttentionBatch(
        int32_vector(args, POSITIONS),
        int32_vector(args, Q_STARTS),
        int32_vector(args, KV_STARTS),
        int32_vector(args, FIRST_PAGES),
        int32_vector(args, PAGES),
        int32_vector(args, WRITE_SLOTS),
        int32_vector(args, TILES),
        int32_vector(args, SEGMENTS),
        int32_vector(args, SPLIT_STARTS),
        settings[NUM_TILES],
        settings[PAGE_SHIFT],
    )
    _run_layers(team, args, settings, heads, state, rows)


@numba.njit  # type: ignore[untyped-decorator]
def _run_layers(
    team: ThreadContext, args: Any, settings: Any, heads: HeadLayout, state: StepBuffers, rows: AttentionBatch
) -> None:
    """Each thread begins with its own strips and then helps with the others', so when it is through all are done."""
    layers, memory = int64_matrix(args, LAYERS), args[WORKSPACES, 0] + team.thread_id * args[WORKSPACES, 2]
    schedule = AttentionSchedule(
        settings[ATTENTION_ISA],
        settings[SPLIT_KV],
        settings[KV_HEADS_PER_ITEM],
        settings[TILE_LANES],
        args[PARTIALS, 0],
        args[FINISHED_SPLITS, 0],
    )
    num_partitions, tokens = settings[NUM_PARTITIONS], int32_vector(args, TOKENS)
    for index in range(len(layers) + 1):
        for i in range(num_partitions):
            partition = (team.thread_id * num_partitions // team.num_threads + i) % num_partitions
            begin, end = partition_bounds(partition, num_partitions, len(state.residual))
            own, part = (
                partition_context(team, partition, num_phases(len(layers))),
                partition_buffers(state, begin, end),
            )
            if index:
                _after_attention(own, args, settings[ACTIVATION], index - 1, part)
            else:
                _embed(own, args, settings[EMBEDDING_BITS], tokens[begin:end], part)
            _before_attention(own, args, settings, heads, index, part, partition_batch(rows, begin, end))
        if index < len(layers):
            keys = settings[KV_CACHE] + 2 * index * settings[KV_CACHE_STRIDE]
            caches, phase = (
                LayerKvCache(keys, keys + settings[KV_CACHE_STRIDE], layers[index, WINDOW]),
                PHASES * index + 4,
            )
            attend(
                team,
                phase,
                state.qkv,
                caches,
                heads,
                rows,
                schedule,
                memory,
                settings[WORKSPACE_LANES],
                state.attention_out,
            )


@numba.njit  # type: ignore[untyped-decorator]
def _before_attention(
    team: ThreadContext,
    args: Any,
    settings: Any,
    heads: HeadLayout,
    index: int,
    state: StepBuffers,
    rows: AttentionBatch,
) -> None:
    """Of layer `index`; behind the last one, the model's last norm."""
    layers, eps, phase = int64_matrix(args, LAYERS), scalar(args, EPS), PHASES * index + 1
    post = layers[index - 1, POST_MLP_NORM] if index else np.int64(0)
    norm = layers[index, NORM] if index < len(layers) else args[FINAL_NORM, 0]
    add_rms_norm(team, phase, state.residual, state.block_out, post, norm, eps, state.normed, state.hidden)
    if index == len(layers):
        return
    layer = layers[index]
    keys = settings[KV_CACHE] + 2 * index * settings[KV_CACHE_STRIDE]
    cos, sin = float32_matrix(args, COS)[layer[ROPE_TABLE]], float32_matrix(args, SIN)[layer[ROPE_TABLE]]
    linear(team, phase + 1, layer[QKV], layer[QKV_BITS], state.hidden, state.qkv)
    apply_rope_and_write_kv(
        team, phase + 2, state.qkv, layer[BIAS], layer[HEAD_NORMS], eps, cos, sin, heads, rows, keys,
        keys + settings[KV_CACHE_STRIDE],
    )  # fmt: skip


@numba.njit  # type: ignore[untyped-decorator]
def _after_attention(team: ThreadContext, args: Any, activation: int, index: int, state: StepBuffers) -> None:
    """Of layer `index`, but for adding its last product."""
    layer, phase = int64_matrix(args, LAYERS)[index], PHASES * index + 5
    eps, gate_up_buffer = (
        scalar(args, EPS),
        float32_matrix(args, GATE_UP_BUFFERS)[team.thread_id].reshape((GATE_UP_ROWS, 2 * TILE_OUTPUTS)),
    )
    linear(team, phase, layer[OUTPUT], layer[OUTPUT_BITS], state.attention_out, state.block_out)
    add_rms_norm(
        team,
        phase + 1,
        state.residual,
        state.block_out,
        layer[POST_NORM],
        layer[MLP_NORM],
        eps,
        state.normed,
        state.hidden,
    )
    gate_up_linear(
        team, phase + 2, layer[GATE_UP], layer[GATE_UP_BITS], activation, state.hidden, state.mlp_inner, gate_up_buffer
    )
    linear(team, phase + 3, layer[DOWN], layer[DOWN_BITS], state.mlp_inner, state.block_out)


@numba.njit  # type: ignore[untyped-decorator]
def _embed(team: ThreadContext, args: Any, bits: int, tokens: Any, state: StepBuffers) -> None:
    items, channels = state.residual.shape
    count = items_per_claim(items, team)
    factor, packed = np.float32(scalar(args, EMBEDDING_SCALE)), int8_matrix(args, EMBEDDING).reshape(-1)
    while True:
        first = claim_work(team.counters, 0, count)
        if first >= items:
            break
        last = min(items, first + count)
        for token in range(first, last):
            dequantize_row(packed, bits, tokens[token], state.residual[token])
            for channel in range(channels):
                state.residual[token, channel] *= factor
                state.block_out[token, channel] = np.float32(0.0)
        mark_done(team.counters, 0, last - first)
    barrier_wait(team.counters, 0, items)


@numba.njit  # type: ignore[untyped-decorator]
def dequantize_row(packed: Any, bits: int, row: int, out: Any) -> None:
    """Row `row` of a packed weight, int8 bytes, as float32 to out [C]."""
    blocks, lane = len(out) // QUANT_BLOCK, row % TILE_OUTPUTS
    size = block_bytes(bits)
    tile = (row // TILE_OUTPUTS) * blocks * size
    half, place = lane // HALF_TILE, lane % HALF_TILE
    numbers = size - 4 * TILE_OUTPUTS
    for block in range(blocks):
        here = tile + block * size
        at = here + numbers + 2 * lane
        scale = half_to_float(np.uint16(np.uint8(packed[at])) | np.uint16(np.uint8(packed[at + 1])) << np.uint16(8))
        at += 2 * TILE_OUTPUTS
        minimum = half_to_float(np.uint16(np.uint8(packed[at])) | np.uint16(np.uint8(packed[at + 1])) << np.uint16(8))
        here += half * (numbers // 2) + 4 * place
        for i in range(QUANT_BLOCK):
            if bits == 8:
                value = np.uint8(packed[here + 64 * (i // 4) + i % 4])
            else:
                value = np.uint8(packed[here + 64 * (i // 8) + i % 4]) >> np.uint8(4 * (i // 4 % 2)) & np.uint8(15)
            out[block * QUANT_BLOCK + i] = np.float32(value) * scale + minimum


@numba.njit  # type: ignore[untyped-decorator]
def block_bytes(bits: int) -> int:
    return QUANT_BLOCK * TILE_OUTPUTS * bits // 8 + 4 * TILE_OUTPUTS


# Entries of the head's plan:
HEAD_IN, HEAD_OUT, HEAD_ACTIVATIONS, HEAD_WEIGHT, HEAD_COUNTERS, HEAD_AMX_SCRATCH, HEAD_ARGMAX = 0, 1, 2, 6, 7, 8, 9
HEAD_ENTRIES, HEAD_PHASES = 10, 3


@numba.njit  # type: ignore[untyped-decorator]
def _compute_logits(team: ThreadContext, args: Any, bits: int, outputs: int) -> None:
    hidden, rounded = float32_matrix(args, HEAD_IN), _activations(args, HEAD_ACTIVATIONS)
    items, channels = hidden.shape
    while True:
        row = claim_work(team.counters, 0, 1)
        if row >= items:
            break
        blocks = channels // 32
        quantize_blocks(address_of(hidden) + 4 * row * channels, rounded, row * blocks, blocks)
        mark_done(team.counters, 0, 1)
    barrier_wait(team.counters, 0, items)
    linear(team, 1, args[HEAD_WEIGHT, 0], bits, rounded, float32_matrix(args, HEAD_OUT))
    _argmax_rows(team, args, outputs)


@numba.njit  # type: ignore[untyped-decorator]
def _argmax_rows(team: ThreadContext, args: Any, outputs: int) -> None:
    """Of as many rows as there is room for in HEAD_ARGMAX: the largest of their logits, and its place."""
    logits, argmax_out = float32_matrix(args, HEAD_OUT), float64_matrix(args, HEAD_ARGMAX)
    items = len(argmax_out)
    while True:
        row = claim_work(team.counters, 2, 1)
        if row >= items:
            break
        highest, place = row_argmax(logits[row, :outputs])
        argmax_out[row, 0] = highest
        argmax_out[row, 1] = place
        mark_done(team.counters, 2, 1)
    barrier_wait(team.counters, 2, items)


def _compiled_kernels(source_hash: int) -> tuple[Any, Any]:
    """The two functions that are called from outside and kept on disk; see `cpu_cache`."""

    @cached_njit(parallel=True)
    def forward(args: Any, threads: int) -> None:
        """Runs the step that `args` describes; hidden states come out in NORMED. The counters must be zero."""
        _ = source_hash
        _schedule_attention(args, threads)
        for thread_id in numba.prange(threads):
            team = _thread_context(thread_id, threads, args, COUNTERS, AMX_SCRATCH)
            if team.scratch:
                amx.load_tile_config(team.scratch)
            _run_thread(team, args)
            if team.scratch:
                amx.release_tiles()

    @cached_njit(parallel=True)
    def compute_logits(args: Any, bits: int, outputs: int, threads: int) -> None:
        """Float32 [n, C] times a packed weight, in the form that HEAD_ACTIVATIONS has room for; and the peaks of its real
        outputs."""
        _ = source_hash
        for thread_id in numba.prange(threads):
            team = _thread_context(thread_id, threads, args, HEAD_COUNTERS, HEAD_AMX_SCRATCH)
            if team.scratch:
                amx.load_tile_config(team.scratch)
            _compute_logits(team, args, bits, outputs)
            if team.scratch:
                amx.release_tiles()

    return forward, compute_logits


forward, compute_logits = _compiled_kernels(SOURCE_HASH)
