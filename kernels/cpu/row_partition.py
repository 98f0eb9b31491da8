"""A step's rows in strips: what a thread takes from one attention to the next within its own core's caches.

Between two attentions a row meets no other row. So with many rows each thread goes through all phases of a strip of
them, and what a phase leaves is in the core's cache that reads it next; each strip has counters of its own, by which
threads that are done with theirs help with the others'.

Knows: rows and counters. Must not know: what a phase computes, how many strips there are and why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from plait.kernels.cpu.amx import TILE_ROWS
from plait.kernels.cpu.ops import AttentionBatch, QuantizedActivations, ThreadContext
from plait.kernels.cpu.threads import COUNTER_STRIDE

PASS_ROWS = 2 * TILE_ROWS  # rows that are multiplied at once


class StepBuffers(NamedTuple):
    """What a step works on: T tokens, C channels, F of the MLP."""

    residual: Any  # [T, C] float32
    block_out: Any  # [T, C]
    normed: Any  # [T, C], the result
    qkv: Any  # [T, (H + 2 G) D]
    hidden: QuantizedActivations  # [T, C]
    attention_out: QuantizedActivations  # [T, H D]
    mlp_inner: QuantizedActivations  # [T, F]


@numba.njit  # type: ignore[untyped-decorator]
def partition_bounds(partition: int, num_partitions: int, rows: int) -> Any:
    """The first row of a strip and the one behind its last; all but the last strip are whole pairs of registers."""
    pairs = (rows + PASS_ROWS - 1) // PASS_ROWS
    return PASS_ROWS * (partition * pairs // num_partitions), min(
        rows, PASS_ROWS * ((partition + 1) * pairs // num_partitions)
    )


@numba.njit  # type: ignore[untyped-decorator]
def partition_context(team: ThreadContext, partition: int, phases: int) -> ThreadContext:
    """The team with the counters of a strip, the first strip's being the team's."""
    return ThreadContext(
        team.thread_id, team.num_threads, team.counters + 16 * COUNTER_STRIDE * phases * partition, team.scratch
    )


@numba.njit  # type: ignore[untyped-decorator]
def partition_buffers(state: StepBuffers, begin: int, end: int) -> StepBuffers:
    """The state of rows begin .. end, `begin` a multiple of 16."""
    return StepBuffers(
        state.residual[begin:end],
        state.block_out[begin:end],
        state.normed[begin:end],
        state.qkv[begin:end],
        _partition_activations(state.hidden, begin, end),
        _partition_activations(state.attention_out, begin, end),
        _partition_activations(state.mlp_inner, begin, end),
    )


@numba.njit  # type: ignore[untyped-decorator]
def _partition_activations(x: QuantizedActivations, begin: int, end: int) -> QuantizedActivations:
    return QuantizedActivations(
        x.qvalues[begin:end], x.scales[begin:end], x.block_sums[begin:end], x.bf16_tiles[begin:end]
    )


@numba.njit  # type: ignore[untyped-decorator]
def partition_batch(rows: AttentionBatch, begin: int, end: int) -> AttentionBatch:
    """Positions and slots of rows begin .. end; what attention reads stays whole."""
    return AttentionBatch(
        rows.positions[begin:end],
        rows.q_starts,
        rows.kv_starts,
        rows.first_pages,
        rows.pages,
        rows.write_slots[begin:end],
        rows.tiles,
        rows.segments,
        rows.split_starts,
        rows.num_tiles,
        rows.page_shift,
    )
