"""The results of one KV split: written as activations, stored as a partial result, or merged into the splits before it.

A partial result has a slot for each key head: float32 accumulators [lanes, D], maxima [lanes] and sums [lanes].
"""

from __future__ import annotations

import numpy as np

from plait.kernels.cpu.attention import kv_layout, online_softmax
from plait.kernels.cpu.attention.isa import F32, INT8_VNNI
from plait.kernels.cpu.attention.tiling import AttentionTask, TileSlice, segment_of
from plait.kernels.cpu.attention.workspace import float32_array, partial_bytes
from plait.kernels.cpu.ops import quantize_blocks

WRITE_OUTPUT, STORE_PARTIAL, MERGE_PARTIAL = range(3)  # values of `on_end`: what happens to the results of a split


def _copy_floats(source: int, target: int, count: int) -> None:
    read, written = float32_array(source, count), float32_array(target, count)
    for i in range(count):
        written[i] = read[i]


def end_segment(
    task: AttentionTask,
    tile_slice: TileSlice,
    segment: int,
    first_lane: int,
    on_end: int,
    partials: int,
    partial_lanes: int,
) -> None:
    """Writes, stores or merges the results of a segment, whose lanes begin at `first_lane` of each key head.

    This must happen before the next segment is computed, whose last vectors may overwrite these lanes.
    """
    _, _, count = segment_of(task.batch, segment)
    lanes, head_dim, ws = count * task.heads.q_per_kv, task.heads.head_dim, task.ws
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        lane = i * tile_slice.lane_stride + first_lane
        accumulators = ws.accumulators + 4 * lane * head_dim
        running_max, running_sum = ws.running_max + 4 * lane, ws.running_sum + 4 * lane
        if on_end == WRITE_OUTPUT:
            _write_output(task, segment, tile_slice.kv_head + i, accumulators, running_sum)
            continue
        slot = partials + i * partial_bytes(partial_lanes, head_dim)
        to_accumulators = slot + 4 * first_lane * head_dim
        to_max = slot + 4 * partial_lanes * head_dim + 4 * first_lane
        to_sum = to_max + 4 * partial_lanes
        if on_end == STORE_PARTIAL:
            _copy_floats(accumulators, to_accumulators, lanes * head_dim)
            _copy_floats(running_max, to_max, lanes)
            _copy_floats(running_sum, to_sum, lanes)
        else:
            _merge_lanes(lanes, head_dim, accumulators, running_max, running_sum, to_accumulators, to_max, to_sum)


def _merge_lanes(
    lanes: int,
    head_dim: int,
    accumulators: int,
    running_max: int,
    running_sum: int,
    to_accumulators: int,
    to_max: int,
    to_sum: int,
) -> None:
    """Merges the softmax state of consecutive lanes into the state at the `to_` addresses."""
    for lane in range(lanes):
        online_softmax.merge_partial(
            accumulators + 4 * lane * head_dim,
            running_max + 4 * lane,
            running_sum + 4 * lane,
            to_accumulators + 4 * lane * head_dim,
            to_max + 4 * lane,
            to_sum + 4 * lane,
            head_dim // 16,
        )


def merge_partials(tile_slice: TileSlice, slots: int, to_slots: int, partial_lanes: int, head_dim: int) -> None:
    """Merges the partial results of one split into those of the splits before it."""
    max_offset = 4 * partial_lanes * head_dim
    sum_offset = max_offset + 4 * partial_lanes
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        slot = slots + i * partial_bytes(partial_lanes, head_dim)
        to = to_slots + i * partial_bytes(partial_lanes, head_dim)
        _merge_lanes(
            tile_slice.lanes, head_dim, slot, slot + max_offset, slot + sum_offset, to, to + max_offset, to + sum_offset
        )


def write_partials(task: AttentionTask, tile_slice: TileSlice, slots: int, partial_lanes: int) -> None:
    """Writes the merged results of all lanes from their slots."""
    heads = task.heads
    for i in range(tile_slice.end_kv_head - tile_slice.kv_head):
        accumulators = slots + i * partial_bytes(partial_lanes, heads.head_dim)
        running_sum = accumulators + 4 * partial_lanes * (heads.head_dim + 1)
        for segment in range(tile_slice.begin_segment, tile_slice.end_segment):
            _write_output(task, segment, tile_slice.kv_head + i, accumulators, running_sum)
            _, _, count = segment_of(task.batch, segment)
            accumulators += 4 * count * heads.q_per_kv * heads.head_dim
            running_sum += 4 * count * heads.q_per_kv


def _write_output(task: AttentionTask, segment: int, kv_head: int, accumulators: int, running_sum: int) -> None:
    """Divides the accumulators of a segment's lanes of one key head by their sums, and writes them to the output."""
    heads, batch, out, isa = task.heads, task.batch, task.out, task.schedule.isa
    blocks, head_dim, lane = out.scales.shape[1], heads.head_dim, 0
    row, first_token, count = segment_of(batch, segment)
    sums = float32_array(running_sum, count * heads.q_per_kv)
    begin = batch.q_starts[row] + first_token
    for token in range(begin, begin + count):
        for head in range(kv_head * heads.q_per_kv, (kv_head + 1) * heads.q_per_kv):
            address = accumulators + 4 * lane * head_dim
            values = float32_array(address, head_dim)
            inverse = np.float32(1.0) / sums[lane]
            for d in range(head_dim):
                values[d] *= inverse
            if isa != F32 and isa != INT8_VNNI:
                kv_layout.unpermute_channels(address, head_dim)
            quantize_blocks(address, out, token * blocks + head * head_dim // 32, head_dim // 32)
            lane += 1
