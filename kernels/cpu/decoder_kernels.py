"""A decoder step as a parallel kernel: the order of its phases.

Every thread runs all phases of all layers. The items of a phase are shared among the threads (`parallel/threads.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import amx, kernel_types
from plait.kernels.cpu import decoder_args as arg
from plait.kernels.cpu.attention.paged import attend, choose_schedule
from plait.kernels.cpu.attention.tiling import AttentionSchedule, build_tiles, count_splits
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.decoder_args import PHASES_PER_LAYER, activations_at, num_phases, thread_context
from plait.kernels.cpu.gemm import experts as moe
from plait.kernels.cpu.gemm.layouts import QUANT_BLOCK, TILE_OUTPUTS
from plait.kernels.cpu.gemm.packed_linear import dequantize_row, gate_up_linear
from plait.kernels.cpu.head_kernels import run_compute_logits
from plait.kernels.cpu.kernel_args import (
    args_at,
    float32_matrix,
    int32_matrix,
    int32_vector,
    int64_matrix,
    scalar,
)
from plait.kernels.cpu.kernel_types import (
    AttentionBatch,
    ExpertBuffers,
    HeadLayout,
    LayerKvCache,
    RowUpdates,
    StepBuffers,
)
from plait.kernels.cpu.low_rank import row_updates
from plait.kernels.cpu.low_rank.row_updates import adapted_linear
from plait.kernels.cpu.ops import add_rms_norm, apply_rope_and_write_kv, copy_rows
from plait.kernels.cpu.parallel.thread_pool import SERIAL_PART, ThreadKernel
from plait.kernels.cpu.parallel.threads import COUNTER_STRIDE, ThreadContext, items_per_claim, shared_items
from plait.kernels.cpu.row_partition import (
    partition_activations,
    partition_batch,
    partition_bounds,
    partition_buffers,
    partition_context,
    partition_updates,
)
from plait.kernels.cpu.vector_ops import address_of

GATE_UP_ROWS = amx.PASS_ROWS  # rows of a thread's buffer for gate and up


def _heads(args: Any, settings: Any) -> HeadLayout:
    return HeadLayout(
        settings[arg.Q_PER_KV],
        settings[arg.NUM_KV_HEADS],
        settings[arg.HEAD_DIM],
        scalar(args, arg.SCORE_SCALE),
        scalar(args, arg.SOFT_CAP),
    )


def _schedule_attention(args: Any, threads: int) -> None:
    """Divides the step's tokens into tiles and KV splits, which are the same in every layer; sets their entries."""
    settings, split_starts = int64_matrix(args, arg.SETTINGS)[0], int32_vector(args, arg.SPLIT_STARTS)
    q_starts, kv_starts = int32_vector(args, arg.Q_STARTS), int32_vector(args, arg.KV_STARTS)
    tiles, segments = int32_vector(args, arg.TILES), int32_vector(args, arg.SEGMENTS)
    first_pages, pages = int32_vector(args, arg.FIRST_PAGES), int32_vector(args, arg.PAGES)
    shift, max_tokens = settings[arg.PAGE_SHIFT], settings[arg.TILE_TOKENS]
    order = split_starts  # shares the memory of `split_starts`, which `count_splits` writes afterwards
    num_tiles = build_tiles(q_starts, kv_starts, first_pages, pages, shift, max_tokens, tiles, segments, order)
    tokens, max_splits = count_splits(q_starts, kv_starts, num_tiles, tiles, segments, split_starts)
    settings[arg.NUM_TILES], settings[arg.TILE_LANES] = num_tiles, tokens * settings[arg.Q_PER_KV]
    heads = _heads(args, settings)
    split_kv, kv_heads_per_item = choose_schedule(
        num_tiles, int(split_starts[num_tiles]), max_splits, tokens * heads.q_per_kv, heads, threads
    )
    settings[arg.SPLIT_KV], settings[arg.KV_HEADS_PER_ITEM] = split_kv, kv_heads_per_item
    finished_splits = int64_matrix(args, arg.FINISHED_SPLITS)
    for row in range(len(finished_splits)):
        for kv_head in range(finished_splits.shape[1]):
            finished_splits[row, kv_head] = 0


def _run_thread(ctx: ThreadContext, args: Any) -> None:
    """Unpacks the arguments and runs all layers in one thread."""
    settings = int64_matrix(args, arg.SETTINGS)[0]
    heads = _heads(args, settings)
    buffers = StepBuffers(
        float32_matrix(args, arg.RESIDUAL),
        float32_matrix(args, arg.BLOCK_OUT),
        float32_matrix(args, arg.NORMED),
        float32_matrix(args, arg.QKV_OUT),
        activations_at(args, arg.HIDDEN),
        activations_at(args, arg.ATTENTION_OUT),
        activations_at(args, arg.MLP_INNER),
    )
    batch = AttentionBatch(
        int32_vector(args, arg.POSITIONS),
        int32_vector(args, arg.Q_STARTS),
        int32_vector(args, arg.KV_STARTS),
        int32_vector(args, arg.FIRST_PAGES),
        int32_vector(args, arg.PAGES),
        int32_vector(args, arg.WRITE_SLOTS),
        int32_vector(args, arg.TILES),
        int32_vector(args, arg.SEGMENTS),
        int32_vector(args, arg.SPLIT_STARTS),
        settings[arg.NUM_TILES],
        settings[arg.PAGE_SHIFT],
    )
    _run_layers(ctx, args, settings, heads, buffers, batch)


def _run_layers(
    ctx: ThreadContext, args: Any, settings: Any, heads: HeadLayout, buffers: StepBuffers, batch: AttentionBatch
) -> None:
    """Runs all layers. Each thread begins with its own row partition, then helps with the others."""
    layers = int64_matrix(args, arg.LAYERS)
    workspace = args[arg.WORKSPACES, 0] + ctx.thread_id * args[arg.WORKSPACES, 2]
    schedule = AttentionSchedule(
        settings[arg.ATTENTION_ISA],
        settings[arg.SPLIT_KV],
        settings[arg.KV_HEADS_PER_ITEM],
        settings[arg.TILE_LANES],
        args[arg.PARTIALS, 0],
        args[arg.FINISHED_SPLITS, 0],
    )
    updates = RowUpdates(
        int32_vector(args, arg.ADAPTER_SLOTS),
        int64_matrix(args, arg.ADAPTER_TABLE),
        0,
        row_updates.rows_per_adapter(len(layers)),
        float32_matrix(args, arg.ADAPTER_TERMS),
    )
    num_partitions, tokens = settings[arg.NUM_PARTITIONS], int32_vector(args, arg.TOKENS)
    for index in range(len(layers) + 1):
        for i in range(num_partitions):
            partition = (ctx.thread_id * num_partitions // ctx.num_threads + i) % num_partitions
            begin, end = partition_bounds(partition, num_partitions, len(buffers.residual))
            part_ctx = partition_context(ctx, partition, num_phases(len(layers)))
            part, of_rows = partition_buffers(buffers, begin, end), partition_updates(updates, begin, end)
            if index:
                _after_attention(part_ctx, args, settings, index - 1, part, of_rows, partition, begin)
            else:
                of_embedding = row_updates.of_product(of_rows, len(layers), kernel_types.EMBEDDING)
                _embed(part_ctx, args, int64_matrix(args, arg.EMBEDDING)[0], tokens[begin:end], part, of_embedding)
            part_batch = partition_batch(batch, begin, end)
            captured = float32_matrix(args, arg.CAPTURED)[begin:end]
            _before_attention(part_ctx, args, settings, heads, index, part, of_rows, part_batch, captured)
        if index < len(layers):
            cache = _layer_cache(settings, layers[index], index)
            attend(
                ctx, first_phase(index) + arg.ATTENTION, buffers.qkv, cache, heads, batch, schedule, workspace,
                settings[arg.WORKSPACE_LANES], buffers.attention_out,
            )  # fmt: skip


def _layer_cache(settings: Any, layer: Any, index: int) -> LayerKvCache:
    keys = settings[arg.KV_CACHE] + 2 * index * settings[arg.KV_CACHE_STRIDE]
    return LayerKvCache(
        keys,
        keys + settings[arg.KV_CACHE_STRIDE],
        layer[arg.WINDOW],
        settings[arg.KV_SLOT_BYTES],
        settings[arg.KV_SCALES],
    )


def _before_attention(
    ctx: ThreadContext,
    args: Any,
    settings: Any,
    heads: HeadLayout,
    index: int,
    buffers: StepBuffers,
    updates: RowUpdates,
    batch: AttentionBatch,
    captured: Any,
) -> None:
    """Adds the output of the previous layer to the residual and runs layer `index` up to attention.

    After the last layer it runs the final norm instead.
    """
    layers, eps, phase = int64_matrix(args, arg.LAYERS), scalar(args, arg.EPS), first_phase(index)
    post = layers[index - 1, arg.POST_MLP_NORM] if index else 0
    norm = layers[index, arg.NORM] if index < len(layers) else args[arg.FINAL_NORM, 0]
    add_rms_norm(ctx, phase, buffers.residual, buffers.block_out, post, norm, eps, buffers.normed, buffers.hidden)
    if index == len(layers):
        return
    layer = layers[index]
    if layer[arg.CAPTURE]:
        first = (layer[arg.CAPTURE] - 1) * buffers.residual.shape[1]
        copy_rows(ctx, phase + arg.CAPTURE_INPUT, buffers.residual, captured, first)
    cos, sin, table = float32_matrix(args, arg.COS), float32_matrix(args, arg.SIN), layer[arg.ROPE_TABLE]
    adapted_linear(
        ctx, phase + arg.QKV_DOWN, layer[arg.QKV : arg.OUTPUT], buffers.hidden, buffers.qkv,
        row_updates.of_product(updates, index, kernel_types.QKV),
    )  # fmt: skip
    apply_rope_and_write_kv(
        ctx, phase + arg.ROPE, buffers.qkv, layer[arg.BIAS], layer[arg.HEAD_NORMS], settings[arg.JOINT_HEAD_NORMS], eps,
        cos[table], sin[table], heads, batch, _layer_cache(settings, layer, index),
    )  # fmt: skip


def _after_attention(
    ctx: ThreadContext,
    args: Any,
    settings: Any,
    index: int,
    buffers: StepBuffers,
    updates: RowUpdates,
    partition: int,
    begin: int,
) -> None:
    """Runs layer `index` from the attention output to the MLP output, which is not added to the residual yet.

    `begin`: the first row of the row partition.
    """
    layer, phase = int64_matrix(args, arg.LAYERS)[index], first_phase(index)
    buffer = float32_matrix(args, arg.GATE_UP_BUFFERS)[ctx.thread_id].reshape((GATE_UP_ROWS, 2 * TILE_OUTPUTS))
    adapted_linear(
        ctx, phase + arg.OUTPUT_DOWN, layer[arg.OUTPUT : arg.GATE_UP], buffers.attention_out, buffers.block_out,
        row_updates.of_product(updates, index, kernel_types.OUTPUT),
    )  # fmt: skip
    add_rms_norm(
        ctx, phase + arg.PRE_MLP_NORM, buffers.residual, buffers.block_out, layer[arg.POST_NORM], layer[arg.MLP_NORM],
        scalar(args, arg.EPS), buffers.normed, buffers.hidden,
    )  # fmt: skip
    if layer[arg.ROUTER]:
        _run_experts(ctx, args, settings, index, buffers, partition, begin, buffer, partition_updates(updates, 0, 0))
        return
    of_gate_up = row_updates.of_product(updates, index, kernel_types.GATE_UP)
    if len(updates.slots):
        row_updates.multiply_down(ctx, phase + arg.GATE_UP_DOWN, of_gate_up, buffers.hidden)
    gate_up_linear(
        ctx, phase + arg.GATE_UP_PRODUCT, layer[arg.GATE_UP : arg.DOWN], settings[arg.ACTIVATION], buffers.hidden,
        buffers.mlp_inner, buffer, of_gate_up,
    )  # fmt: skip
    adapted_linear(
        ctx, phase + arg.DOWN_DOWN, layer[arg.DOWN : arg.NORM], buffers.mlp_inner, buffers.block_out,
        row_updates.of_product(updates, index, kernel_types.DOWN),
    )  # fmt: skip


def first_phase(layer: int) -> Any:
    """The first phase of a layer, behind that of the embedding."""
    return PHASES_PER_LAYER * layer + 1


def _run_experts(
    ctx: ThreadContext,
    args: Any,
    settings: Any,
    index: int,
    buffers: StepBuffers,
    partition: int,
    begin: int,
    gate_up_buffer: Any,
    no_updates: RowUpdates,
) -> None:
    """Runs the mixture of experts of layer `index`, in place of its MLP."""
    layer, num_experts = int64_matrix(args, arg.LAYERS)[index], settings[arg.NUM_EXPERTS]
    slot = args[arg.LAYERS, 1] * partition + index  # of this partition and layer
    counters = args[arg.EXPERT_COUNTERS, 0] + 16 * COUNTER_STRIDE * moe.NUM_PHASES * slot
    expert_ctx = ctx._replace(counters=counters)
    end = begin + len(buffers.residual)
    per_token, groups = args[arg.CHOSEN, 2], int32_matrix(args, arg.GROUPS)[slot]
    experts = ExpertBuffers(
        float32_matrix(args, arg.SCORES)[begin:end],
        int32_matrix(args, arg.CHOSEN)[begin:end],
        float32_matrix(args, arg.WEIGHTS)[begin:end],
        int32_matrix(args, arg.PLACES)[begin:end],
        groups[:num_experts],
        groups[num_experts:],
        partition_activations(activations_at(args, arg.EXPERT_INPUTS), begin * per_token, end * per_token),
        partition_activations(activations_at(args, arg.EXPERT_INNER), begin * per_token, end * per_token),
        float32_matrix(args, arg.EXPERT_OUT)[begin * per_token : end * per_token],
    )
    moe.score_experts(expert_ctx, layer[arg.ROUTER], num_experts, buffers.normed, experts)
    moe.choose_experts(expert_ctx, num_experts, settings[arg.NORMALIZE_TOPK], experts)
    moe.group_by_expert(expert_ctx, experts)
    moe.gather_inputs(expert_ctx, buffers.normed, experts)
    gate_up = layer[arg.GATE_UP : arg.DOWN]
    moe.multiply_gate_up(expert_ctx, gate_up, settings[arg.ACTIVATION], experts, gate_up_buffer, no_updates)
    moe.multiply_down(expert_ctx, layer[arg.DOWN : arg.NORM], num_experts, experts)
    moe.combine_outputs(expert_ctx, experts, buffers.block_out)


def _embed(ctx: ThreadContext, args: Any, weight: Any, tokens: Any, buffers: StepBuffers, updates: RowUpdates) -> None:
    """Writes the embeddings of the tokens to the residual, and zeros to `block_out`."""
    items, channels = buffers.residual.shape
    factor = np.float32(scalar(args, arg.EMBEDDING_SCALE))
    for token in shared_items(ctx, 0, items, items_per_claim(items, ctx)):
        row = address_of(buffers.residual) + 4 * token * channels
        dequantize_row(weight, int(tokens[token]), channels // QUANT_BLOCK, row)
        if len(updates.slots):
            row_updates.add_to_embedding(updates, token, int(tokens[token]), row, channels // TILE_OUTPUTS)
        for channel in range(channels):
            buffers.residual[token, channel] *= factor
            buffers.block_out[token, channel] = np.float32(0.0)


def run_forward(thread_id: int, threads: int, address: int) -> None:
    """Runs one thread's part of the step that the arguments describe, and writes the hidden states to NORMED."""
    args = args_at(address, arg.ENTRIES)
    if thread_id == SERIAL_PART:
        _schedule_attention(args, threads)
        return
    ctx = thread_context(thread_id, threads, args, arg.COUNTERS, arg.AMX_SCRATCH)
    if ctx.scratch:
        amx.load_tile_config(ctx.scratch)
    _run_thread(ctx, args)
    if ctx.scratch:
        amx.release_tiles()


# The kernels that Python calls. The caller sets their counters to zero.
LIBRARY = KernelLibrary("decoder", run_forward, run_compute_logits)
forward, compute_logits = ThreadKernel(run_forward, LIBRARY), ThreadKernel(run_compute_logits, LIBRARY)
