"""Partitions a step's rows (tokens) so that a thread's intermediate results stay in its own core's caches.

Between two attention phases no row depends on another. In a step of many rows each thread therefore takes a range of
rows through all phases from one attention to the next. Each partition has its own counters, by which threads that
have finished theirs help with the others.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu.amx import PASS_ROWS
from plait.kernels.cpu.kernel_types import AttentionBatch, QuantizedActivations, RowUpdates, StepBuffers
from plait.kernels.cpu.parallel.threads import COUNTER_STRIDE, ThreadContext


def partition_bounds(partition: int, num_partitions: int, rows: int) -> Any:
    """Returns a partition's first row and the row after its last, whole passes but for the last partition."""
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    begin, end = partition * passes // num_partitions, (partition + 1) * passes // num_partitions
    return PASS_ROWS * begin, min(rows, PASS_ROWS * end)


def partition_context(ctx: ThreadContext, partition: int, phases: int) -> ThreadContext:
    """Returns the context with a partition's counters; those of the first partition are the context's own."""
    return ctx._replace(counters=ctx.counters + 16 * COUNTER_STRIDE * phases * partition)


def partition_buffers(buffers: StepBuffers, begin: int, end: int) -> StepBuffers:
    """Returns the buffers of rows [begin, end); `begin` is a multiple of 16."""
    return StepBuffers(
        buffers.residual[begin:end],
        buffers.block_out[begin:end],
        buffers.normed[begin:end],
        buffers.qkv[begin:end],
        partition_activations(buffers.hidden, begin, end),
        partition_activations(buffers.attention_out, begin, end),
        partition_activations(buffers.mlp_inner, begin, end),
    )


def partition_updates(updates: RowUpdates, begin: int, end: int) -> RowUpdates:
    """Returns the adapters of rows [begin, end)."""
    return updates._replace(slots=updates.slots[begin:end], terms=updates.terms[begin:end])


def partition_activations(x: QuantizedActivations, begin: int, end: int) -> QuantizedActivations:
    """Returns rows [begin, end)."""
    return QuantizedActivations(
        x.quants[begin:end],
        x.scales[begin:end],
        x.block_sums[begin:end],
        x.half_sums[begin:end],
        x.bf16_tiles[begin:end],
    )


def partition_batch(batch: AttentionBatch, begin: int, end: int) -> AttentionBatch:
    """Returns the batch with the positions and slots of rows [begin, end); all else stays whole."""
    return batch._replace(positions=batch.positions[begin:end], write_slots=batch.write_slots[begin:end])
