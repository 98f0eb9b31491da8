"""A mixture of experts (Shazeer 2017): each token's MLP is the weighted sum of a few of many, which a router chooses.

Tokens are grouped by expert, so that an expert's weights are read once for all its tokens, and those of other experts
not at all. The products take int8 activations whatever the size of the step: an expert has few tokens of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.gemm.amx_blocking import TileStream
from plait.kernels.cpu.gemm.layouts import TILE_OUTPUTS
from plait.kernels.cpu.gemm.packed_linear import (
    DEQUANTIZE,
    MULTIPLY_PASS,
    NUM_TILES,
    PART_COLUMNS,
    PRODUCT,
    TILE_STRIDE,
    TILES_AT,
    gate_up_tiles,
    multiply_tiles,
)
from plait.kernels.cpu.kernel_types import ExpertBuffers, PrefetchList, RowUpdates
from plait.kernels.cpu.ops import quantize_blocks
from plait.kernels.cpu.parallel.threads import (
    ThreadContext,
    barrier_wait,
    claim_work,
    items_per_claim,
    mark_done,
    shared_items,
    shared_ranges,
)
from plait.kernels.cpu.row_partition import partition_activations
from plait.kernels.cpu.vector_ops import address_of

NUM_PHASES = 7
GROUP = 16  # experts whose scores for a token are one item
NO_SCORE = np.float32(-1e30)  # of the entries behind the last expert


def score_experts(ctx: ThreadContext, router: int, num_experts: int, normed: Any, experts: ExpertBuffers) -> None:
    """Phase 0: writes the router's products with normed [T, C]; `router`: the address of float32 [E, C]."""
    rows, width = experts.scores.shape
    channels, groups = normed.shape[1], width // GROUP
    items = rows * groups
    for item in shared_items(ctx, 0, items, items_per_claim(items, ctx)):
        token, begin = item // groups, item % groups * GROUP
        x = address_of(normed) + 4 * token * channels
        for expert in range(begin, begin + GROUP):
            score = NO_SCORE
            if expert < num_experts:
                score = vector_ops.dot(x, router + 4 * expert * channels, channels // 16)
            experts.scores[token, expert] = score


def choose_experts(ctx: ThreadContext, num_experts: int, normalize: int, experts: ExpertBuffers) -> None:
    """Phase 1: writes each token's experts and their weights: the largest of the softmax over all.

    With `normalize`, the weights of the chosen experts are scaled to sum to 1.
    """
    items, width = experts.scores.shape
    for token in shared_items(ctx, 1, items, 1):
        scores = experts.scores[token]
        highest = scores[0]
        for expert in range(1, num_experts):
            if scores[expert] > highest:
                highest = scores[expert]
        total = vector_ops.exp_into(address_of(scores), highest, width // 16)
        chosen_total = np.float32(0.0)
        for k in range(experts.chosen.shape[1]):
            best = 0
            for expert in range(1, num_experts):
                if scores[expert] > scores[best]:
                    best = expert
            experts.chosen[token, k] = best
            experts.weights[token, k] = scores[best]
            chosen_total += scores[best]
            scores[best] = np.float32(-1.0)
        if normalize:
            total = chosen_total
        for k in range(experts.chosen.shape[1]):
            experts.weights[token, k] /= total


def group_by_expert(ctx: ThreadContext, experts: ExpertBuffers) -> None:
    """Phase 2, one item: gives the pairs of tokens and experts their rows, in the order of the experts."""
    num_experts, ends = len(experts.ends), experts.ends
    if claim_work(ctx.counters, 2, 1) == 0:
        for expert in range(num_experts):
            ends[expert] = 0
        for token in range(experts.chosen.shape[0]):
            for k in range(experts.chosen.shape[1]):
                ends[int(experts.chosen[token, k])] += 1
        begin, num_active = 0, 0
        for expert in range(num_experts):
            count = int(ends[expert])
            ends[expert] = begin
            begin += count
            if count:
                num_active += 1
                experts.active[num_active] = expert
        experts.active[0] = num_active
        for token in range(experts.chosen.shape[0]):
            for k in range(experts.chosen.shape[1]):
                chosen = int(experts.chosen[token, k])
                experts.places[token, k] = ends[chosen]
                ends[chosen] += 1
        mark_done(ctx.counters, 2, 1)
    barrier_wait(ctx.counters, 2, 1)


def gather_inputs(ctx: ThreadContext, normed: Any, experts: ExpertBuffers) -> None:
    """Phase 3: quantizes each token to the rows of its pairs."""
    items, channels = normed.shape
    blocks = channels // 32
    for token in shared_items(ctx, 3, items, items_per_claim(items, ctx)):
        x = address_of(normed) + 4 * token * channels
        for k in range(experts.places.shape[1]):
            quantize_blocks(x, experts.inputs, int(experts.places[token, k]) * blocks, blocks)


def _stream_of_expert(parts: Any, first_column: int, tiles: int, expert: int) -> TileStream:
    """The tiles of one expert of a weight whose outputs are those of all experts."""
    stride = parts[first_column + TILE_STRIDE]
    return TileStream(
        parts[first_column + DEQUANTIZE],
        parts[first_column + MULTIPLY_PASS],
        parts[first_column + TILES_AT] + expert * tiles * stride,
        stride,
    )


def _first_row(experts: ExpertBuffers, expert: int) -> Any:
    if expert == 0:
        return 0
    return int(experts.ends[expert - 1])


def multiply_gate_up(
    ctx: ThreadContext, parts: Any, activation: int, experts: ExpertBuffers, buffer: Any, no_updates: RowUpdates
) -> None:
    """Phase 4: as `packed_linear.gate_up_linear`, for the rows of each active expert.

    `parts`: gate and up of all experts. An item is two tiles of an expert.
    """
    tiles = experts.inner.scales.shape[1]
    items = int(experts.active[0]) * tiles
    for item, last in shared_ranges(ctx, 4, items):
        while item < last:
            expert, first_tile = int(experts.active[1 + item // tiles]), item % tiles
            last_tile = min(tiles, first_tile + last - item)
            begin, end = _first_row(experts, expert), int(experts.ends[expert])
            gate = _stream_of_expert(parts, 0, tiles, expert)
            up = _stream_of_expert(parts, PART_COLUMNS, tiles, expert)
            functions = (parts[PRODUCT], parts[PART_COLUMNS + PRODUCT])
            x = partition_activations(experts.inputs, begin, end)
            out = partition_activations(experts.inner, begin, end)
            gate_up_tiles(functions, gate, up, activation, x, out, first_tile, last_tile, buffer, no_updates)
            item += last_tile - first_tile


def multiply_down(ctx: ThreadContext, parts: Any, num_experts: int, experts: ExpertBuffers) -> None:
    """Phase 5: multiplies the rows of each active expert with its second weight."""
    tiles = int(parts[NUM_TILES]) // num_experts
    items = int(experts.active[0]) * tiles
    stride = 4 * int(experts.out.shape[1])
    for item, last in shared_ranges(ctx, 5, items):
        while item < last:
            expert, first_tile = int(experts.active[1 + item // tiles]), item % tiles
            last_tile = min(tiles, first_tile + last - item)
            begin, end = _first_row(experts, expert), int(experts.ends[expert])
            multiply_tiles(
                parts[PRODUCT], _stream_of_expert(parts, 0, tiles, expert), first_tile, last_tile, experts.inner,
                begin, end - begin, address_of(experts.out) + begin * stride + 4 * TILE_OUTPUTS * first_tile, stride,
                4 * TILE_OUTPUTS, PrefetchList(0, 0),
            )  # fmt: skip
            item += last_tile - first_tile


def combine_outputs(ctx: ThreadContext, experts: ExpertBuffers, out: Any) -> None:
    """Phase 6: writes the weighted sum of each token's experts to out [T, C], in the order of their scores."""
    items, channels = out.shape
    for token in shared_items(ctx, 6, items, items_per_claim(items, ctx)):
        row = address_of(out) + 4 * token * channels
        for channel in range(channels):
            out[token, channel] = np.float32(0.0)
        for k in range(experts.places.shape[1]):
            addend = address_of(experts.out) + 4 * channels * int(experts.places[token, k])
            vector_ops.add_scaled_into(row, addend, experts.weights[token, k], channels // 16)
