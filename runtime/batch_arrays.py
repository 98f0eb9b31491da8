"""A batch as arrays: its tokens, where each row begins, in which pages its keys and values lie.

Knows: batches and their rows. Must not know: devices, models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plait.runtime.scheduler.page_pool import IntArray
from plait.runtime.scheduler.rows import Batch


class BatchArrays(NamedTuple):
    """All int32, R rows, T new tokens; `layout.AttentionLayout` explains the last five.

    `token_ids` that are not known yet are negative, see BatchRow; `wanted` are the places where logits are wanted.
    """

    token_ids: IntArray  # [T]
    wanted: IntArray  # [batch.num_logits]
    q_starts: IntArray  # [R + 1]
    kv_starts: IntArray  # [R + 1]
    kv_pages: IntArray
    positions: IntArray  # [T]
    writes: IntArray  # [T]


def batch_arrays(batch: Batch) -> BatchArrays:
    """The batch's rows, one after the other."""
    rows = batch.rows
    ends = [each.start + each.count for each in rows]
    pages = [each.pages() for each in rows]
    return BatchArrays(
        batch.token_ids(),
        _logit_positions(batch),
        starts([each.count for each in rows]),
        starts(ends),
        np.concatenate(pages),
        np.concatenate([np.arange(each.start, end, dtype=np.int32) for each, end in zip(rows, ends, strict=True)]),
        np.concatenate([p[each.start :] for each, p in zip(rows, pages, strict=True)]),
    )


def _logit_positions(batch: Batch) -> IntArray:
    """Indices among the batch's tokens."""
    found, at = [], 0
    for each in batch.rows:
        at += each.count
        found.append(np.arange(at - each.num_logits, at, dtype=np.int32))
    return np.concatenate(found)


def starts(lengths: list[int]) -> IntArray:
    """Where each of ranges of these lengths begins, one behind the other, and the end of the last: [n + 1]."""
    found = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=found[1:])
    return found
