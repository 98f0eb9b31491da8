"""Divides a step into micro-batches, which the stages of a pipeline compute one after the other, at the same time.

    stage 0   | 0 | 1 | 2 |
    stage 1       | 0 | 1 | 2 |        3 micro-batches take 4 turns, not 6

A micro-batch is a range of the step's new tokens: complete rows, and at its ends parts of prompt chunks, cut at
multiples of `CUT_ALIGN` tokens of the text, which are page borders (a page holds one token). The order of the tokens
stays that of the step. So a row's earlier tokens, and prefixes that another row of the step computes, are in the same
micro-batch or an earlier one: the scheduler adds a row that reads new pages behind the row that writes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from plait.kernels.layout import shared_prefix_arrays
from plait.runtime.arrays import IntArray
from plait.runtime.executor.batch_arrays import BatchArrays

CUT_ALIGN = 64  # tokens; attention's larger tiles have as many


class StepCosts(NamedTuple):
    """What a stage's time for a micro-batch of n tokens that read m tokens of KV is: weights + n + m * kv.

    The unit is the arithmetic of one token. `weights`: reading the stage's weights. `kv`: reading a token's KV.
    """

    weights: float
    kv: float


def micro_batch_ends(arrays: BatchArrays, num_stages: int, costs: StepCosts) -> list[int]:
    """Where the micro-batches of a step end, as numbers of its new tokens; the last end is their number T.

    S stages need (M + S - 1) * (weights + work / M) for M micro-batches of equal work, which is least for
    M = sqrt((S - 1) * work / weights). Each of them reads all weights, so decode steps of few rows are not divided.
    """
    total = len(arrays.token_ids)
    if num_stages == 1:
        return [total]
    counts, lengths = np.diff(arrays.q_starts), np.diff(arrays.kv_starts)
    row_costs = counts + costs.kv * lengths
    row_ends = np.cumsum(row_costs)
    wanted = round(math.sqrt((num_stages - 1) * float(row_ends[-1]) / costs.weights))
    ends = {total}
    for k in range(1, min(wanted, total)):
        target = float(row_ends[-1]) * k / wanted
        row = min(int(np.searchsorted(row_ends, target)), len(counts) - 1)
        done = (target - float(row_ends[row] - row_costs[row])) / float(row_costs[row])  # of the row, 0 to 1
        ends.add(int(arrays.q_starts[row]) + _cut(int(counts[row]), int(lengths[row]), done))
    return sorted(ends - {0})


def _cut(count: int, length: int, done: float) -> int:
    """How many of a row's `count` new tokens, the last of `length`, are before a cut at about `done` of them."""
    if count < 2 * CUT_ALIGN:
        return count if done >= 0.5 else 0
    start = length - count
    position = round((start + done * count) / CUT_ALIGN) * CUT_ALIGN
    return min(max(position - start, 0), count)


def split_step(
    arrays: BatchArrays, shared: Sequence[IntArray], ends: Sequence[int]
) -> list[tuple[BatchArrays, Sequence[IntArray]]]:
    """The arrays of each micro-batch, and those of its shared prefixes; `ends` as from `micro_batch_ends`."""
    if len(ends) < 2:
        return [(arrays, shared)]
    begins = [0, *ends[:-1]]
    return [_part(arrays, shared, begin, end) for begin, end in zip(begins, ends, strict=True)]


def _part(
    arrays: BatchArrays, shared: Sequence[IntArray], begin: int, end: int
) -> tuple[BatchArrays, Sequence[IntArray]]:
    """The arrays of the new tokens [begin, end)."""
    q_starts, kv_starts = arrays.q_starts, arrays.kv_starts
    first = int(np.searchsorted(q_starts, begin, side="right")) - 1
    last = int(np.searchsorted(q_starts, end, side="left")) - 1
    kv_end = kv_starts[last + 1] - (q_starts[last + 1] - end)  # the last row may go on in the next micro-batch
    part_kv_starts = kv_starts[first : last + 2] - kv_starts[first]
    part_kv_starts[-1] = kv_end - kv_starts[first]
    outputs = arrays.output_indices
    part = BatchArrays(
        token_ids=arrays.token_ids[begin:end],
        output_indices=outputs[(outputs >= begin) & (outputs < end)] - np.int32(begin),
        q_starts=np.clip(q_starts[first : last + 2], begin, end) - np.int32(begin),
        kv_starts=part_kv_starts,
        kv_pages=arrays.kv_pages[kv_starts[first] : kv_end],
        positions=arrays.positions[begin:end],
        write_slots=arrays.write_slots[begin:end],
    )
    return part, _shared_part(q_starts, shared, begin, end, slice(first, last + 1)) if shared else ()


def _shared_part(
    q_starts: IntArray, shared: Sequence[IntArray], begin: int, end: int, part_rows: slice
) -> Sequence[IntArray]:
    """The shared prefixes of the rows that are complete in [begin, end), as `shared_prefix_arrays` returns them."""
    lengths, _, starts, tokens, _ = shared
    is_complete = (q_starts[:-1] >= begin) & (q_starts[1:] <= end)
    groups = []
    for start, stop in pairwise(starts):
        members = np.searchsorted(q_starts, tokens[start:stop], side="right") - 1
        rows = [int(row) for row in dict.fromkeys(members.tolist()) if is_complete[row]]
        if len(rows) > 1:
            groups.append(([row - part_rows.start for row in rows], int(lengths[rows[0]])))
    if not groups:
        return ()
    inside = np.clip(q_starts, begin, end)
    return shared_prefix_arrays(groups, (inside[1:] - inside[:-1])[part_rows])
