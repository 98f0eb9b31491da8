"""A batch as arrays: its tokens, where each row begins, in which pages its keys and values lie.

Knows: batches and their rows. Must not know: devices, models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.runtime.arrays import IntArray
from plait.runtime.batch.batch import Batch


class BatchArrays(NamedTuple):
    """All int32, R rows, T new tokens; `layout.AttentionLayout` explains the last five.

    `token_ids` that are not known yet are negative, see ScheduledRequest; `output_indices` are the places where hidden states are, for
    logits or for themselves.
    """

    token_ids: IntArray  # [T]
    output_indices: IntArray  # [batch.num_logits + batch.num_states]
    q_starts: IntArray  # [R + 1]
    kv_starts: IntArray  # [R + 1]
    kv_pages: IntArray
    positions: IntArray  # [T]
    write_slots: IntArray  # [T]


def batch_arrays(batch: Batch) -> BatchArrays:
    """The batch's rows, one after the other."""
    rows = batch.rows
    if batch.num_tokens == len(rows) == batch.num_logits + batch.num_states:
        return _decode_arrays(batch)
    output_indices = [(each.count, each.start, each.num_logits + each.num_states) for each in rows]
    numbers = np.array(output_indices, dtype=np.int32)
    counts, start_positions, num_outputs = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    q_starts, kv_starts = starts(counts), starts(counts + start_positions)
    kv_pages = np.concatenate([each.pages() for each in rows])
    each_token = np.arange(q_starts[-1], dtype=np.int32)
    positions = each_token + np.repeat(start_positions - q_starts[:-1], counts)
    write_slots = kv_pages[positions + np.repeat(kv_starts[:-1], counts)]
    is_output = each_token >= np.repeat(q_starts[1:] - num_outputs, counts)
    return BatchArrays(batch.token_ids(), each_token[is_output], q_starts, kv_starts, kv_pages, positions, write_slots)


def _decode_arrays(batch: Batch) -> BatchArrays:
    """Where every row decodes: the same in a third of the time."""
    ends = np.array([each.start + 1 for each in batch.rows], dtype=np.int32)
    kv_starts, kv_pages = starts(ends), np.concatenate([each.pages() for each in batch.rows])
    q_starts = np.arange(len(ends) + 1, dtype=np.int32)
    write_slots = kv_pages[kv_starts[1:] - 1]
    return BatchArrays(batch.token_ids(), q_starts[:-1], q_starts, kv_starts, kv_pages, ends - 1, write_slots)


def starts(lengths: list[int] | IntArray) -> IntArray:
    """Where each of ranges of these lengths begins, one behind the other, and the end of the last: [n + 1]."""
    found = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=found[1:])
    return found
