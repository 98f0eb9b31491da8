"""Converts a batch to the index arrays that a model's forward pass reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from plait.runtime.arrays import IntArray
from plait.runtime.batch.batch import Batch


class BatchArrays(NamedTuple):
    """All int32; R rows, T new tokens. `AttentionLayout` explains the last five."""

    token_ids: IntArray  # [T]; negative ids are placeholders for tokens not sampled yet, see ScheduledRequest
    output_indices: IntArray  # [batch.num_logits + batch.num_states] the new tokens whose hidden states are needed
    q_starts: IntArray  # [R + 1]
    kv_starts: IntArray  # [R + 1]
    kv_pages: IntArray
    positions: IntArray  # [T]
    write_slots: IntArray  # [T]


def batch_arrays(batch: Batch) -> BatchArrays:
    """Returns the arrays of the batch's rows, one row after the other."""
    rows = batch.rows
    if batch.num_tokens == len(rows) == batch.num_logits + batch.num_states:
        return _decode_arrays(batch)
    row_lengths = [(row.count, row.start, row.num_logits + row.num_states) for row in rows]
    counts, start_positions, num_outputs = np.array(row_lengths, dtype=np.int32).T
    q_starts, kv_starts = starts(counts), starts(counts + start_positions)
    kv_pages = np.concatenate([row.pages() for row in rows])
    token_indices = np.arange(q_starts[-1], dtype=np.int32)
    positions = token_indices + np.repeat(start_positions - q_starts[:-1], counts)
    write_slots = kv_pages[positions + np.repeat(kv_starts[:-1], counts)]
    is_output = token_indices >= np.repeat(q_starts[1:] - num_outputs, counts)
    output_indices = token_indices[is_output]
    return BatchArrays(batch.token_ids(), output_indices, q_starts, kv_starts, kv_pages, positions, write_slots)


def _decode_arrays(batch: Batch) -> BatchArrays:
    """`batch_arrays` of a batch whose rows all decode one token, in a third of the time."""
    ends = np.array([row.start + 1 for row in batch.rows], dtype=np.int32)
    kv_starts, kv_pages = starts(ends), np.concatenate([row.pages() for row in batch.rows])
    q_starts = np.arange(len(ends) + 1, dtype=np.int32)
    write_slots = kv_pages[kv_starts[1:] - 1]
    return BatchArrays(batch.token_ids(), q_starts[:-1], q_starts, kv_starts, kv_pages, ends - 1, write_slots)


class AdapterRows(NamedTuple):
    """The slots of adapters in a batch, int32; -1: no adapter."""

    of_tokens: IntArray  # [T]
    of_logits: IntArray  # [batch.num_logits]


def adapter_rows(batch: Batch, slots: Mapping[str, int]) -> AdapterRows | None:
    """The slots of a batch's adapters, by their ids; None if no row has one."""
    adapters = (row.request.seq.namespace.adapter for row in batch.rows)
    of_rows = [slots[adapter] if adapter else -1 for adapter in adapters]
    if max(of_rows, default=-1) < 0:
        return None
    counts = [[getattr(row, name) for row in batch.rows] for name in ("count", "num_logits")]
    return AdapterRows(*(np.repeat(np.array(of_rows, np.int32), of_kind) for of_kind in counts))


def starts(lengths: list[int] | IntArray) -> IntArray:
    """Returns [n + 1]: the start of each of n consecutive ranges of these lengths, and the end of the last."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
