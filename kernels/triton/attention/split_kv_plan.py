"""Plans on the device how decode rows (one new token, or a short draft) are split along their keys.

The number of work items is fixed by the number of rows, so a step can be captured in a CUDA graph; what each item
does depends on the lengths of the current step:

    work items   W = R + extra items (extra: enough to fill the GPU)
    split        = all keys of decode rows / extra, in whole blocks, at least 2 blocks
    row          gets max(1, round(its keys / split)) equal splits; their sum never exceeds W

So one long row, alone or among short ones, is spread over the whole GPU, and rows of a full batch are not split and
are not merged (flash-decoding, Dao et al. 2023; the plan on the device is ours). One small program plans once per
forward pass for all layers of a kind.

Columns of a work item: row, q_start, q_len, kv_len, start in kv_pages, first key, end of keys, 1 if the row is unsplit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.layout import AttentionLayout, AttentionShape, SplitKVPlan
from plait.kernels.triton.attention.tile_config import (
    decode_tile_config,
    decode_tile_rows,
    gpu_spec,
    group_size,
    num_extra_work_items,
    num_prefix_splits,
)

MAX_ROWS = 4096
WORK_ITEM_COLUMNS = 8
MIN_PLAN_BLOCK = 64  # rows; smaller powers of two would each compile one more kernel


@triton.jit(do_not_specialize=["num_rows", "num_extra_items", "max_decode_q_len", "window", "num_kv_heads"])
def _plan_kernel(
    q_starts,
    kv_starts,
    page_starts,
    shared_lens,
    work_items,  # [W, 8], columns as in the file's header
    row_item_starts,
    arrivals,
    num_rows,
    num_extra_items,
    max_decode_q_len,
    window,
    num_kv_heads,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    r = tl.arange(0, BLOCK_R)
    real = r < num_rows
    q_start = tl.load(q_starts + r, mask=real, other=0)
    q_len = tl.load(q_starts + r + 1, mask=real, other=0) - q_start
    kv_len = tl.load(kv_starts + r + 1, mask=real, other=0) - tl.load(kv_starts + r, mask=real, other=0)
    pages_at = tl.load(page_starts + r, mask=real, other=0)
    is_planned = (q_len > 0) & (q_len <= max_decode_q_len) & (kv_len > 0)
    begin = tl.zeros([BLOCK_R], tl.int32)
    if SHARED:
        begin = tl.load(shared_lens + r, mask=real, other=0)
    no_prefix = begin == 0
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(kv_len - q_len - window + 1, 0) // BLOCK_N * BLOCK_N)
    length = tl.where(is_planned, kv_len - begin, 0)
    split = tl.maximum((tl.sum(length.to(tl.int64), 0) + num_extra_items - 1) // num_extra_items, 2 * BLOCK_N).to(
        tl.int32
    )
    split = (split + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    count = tl.maximum((length + split // 2) // split, 1)
    step = ((length + count - 1) // count + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    step = tl.maximum(step, BLOCK_N)
    count = tl.where(is_planned, (length + step - 1) // step, 0)
    ends = tl.cumsum(count, 0)
    first = ends - count
    tl.store(row_item_starts + r, first, mask=real)
    tl.store(row_item_starts + num_rows, tl.sum(count, 0))
    for head in range(0, num_kv_heads):
        tl.store(arrivals + r * num_kv_heads + head, 0, mask=real)
    is_unsplit = ((count == 1) & no_prefix).to(tl.int32)
    for i in range(0, tl.max(count, 0)):
        item = work_items + (first + i) * 8
        has_item = i < count
        tl.store(item + 0, r, mask=has_item)
        tl.store(item + 1, q_start, mask=has_item)
        tl.store(item + 2, q_len, mask=has_item)
        tl.store(item + 3, kv_len, mask=has_item)
        tl.store(item + 4, pages_at, mask=has_item)
        tl.store(item + 5, begin + i * step, mask=has_item)
        tl.store(item + 6, tl.minimum(begin + i * step + step, kv_len), mask=has_item)
        tl.store(item + 7, is_unsplit, mask=has_item)


def allocate_plan(
    shape: AttentionShape,
    num_rows: int,
    device: torch.device,
    *,
    max_q_len: int = 1,
    shared_tokens: int = 0,
) -> SplitKVPlan:
    """Allocates a plan for batches of exactly `num_rows` rows (pad with empty ones), to be filled by `fill_plan`.

    `max_q_len` is the most new tokens of a row, `shared_tokens` the length of SharedPrefixes.tokens, 0 without shared
    prefixes. ValueError beyond MAX_ROWS rows.
    """
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"a batch has 1 to {MAX_ROWS} rows, not {num_rows}")
    gpu, groups = gpu_spec(device), shape.num_kv_heads
    rows = decode_tile_rows(shape, max_q_len)
    num_items = num_rows + num_extra_work_items(gpu, shape)
    prefix: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if shared_tokens:
        splits = num_prefix_splits(gpu, shape, shared_tokens)
        sums = torch.empty((splits, shared_tokens, shape.num_heads), dtype=torch.float32, device=device)
        prefix = (sums.new_empty((*sums.shape, shape.head_dim)), sums)
    return SplitKVPlan(
        shape=shape,
        block_rows=rows,
        work_items=torch.empty((num_items, WORK_ITEM_COLUMNS), dtype=torch.int32, device=device),
        row_item_starts=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        partial_out=torch.empty((num_items, groups, rows, shape.head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((num_items, groups, rows), dtype=torch.float32, device=device),
        arrivals=torch.empty((num_rows, groups), dtype=torch.int32, device=device),
        prefix_out=prefix[0],
        prefix_lse=prefix[1],
    )


def fill_plan(plan: SplitKVPlan, layout: AttentionLayout) -> None:
    """Plans this batch by one launch. ValueError if the plan was allocated for another number of rows."""
    if len(plan.row_item_starts) != layout.num_rows + 1:
        raise ValueError(f"a plan for {len(plan.row_item_starts) - 1} rows cannot hold {layout.num_rows}")
    if layout.shared is not None and plan.prefix_out is None:
        raise ValueError("the batch has shared prefixes, but the plan was allocated without")
    shape, gpu = plan.shape, gpu_spec(plan.work_items.device)
    _plan_kernel[(1,)](
        layout.q_starts,
        layout.kv_starts,
        layout.first_pages,
        layout.kv_starts if layout.shared is None else layout.shared.lengths,
        plan.work_items,
        plan.row_item_starts,
        plan.arrivals,
        layout.num_rows,
        len(plan.work_items) - layout.num_rows,
        plan.block_rows // group_size(shape),
        shape.window or 0,
        shape.num_kv_heads,
        BLOCK_R=max(MIN_PLAN_BLOCK, triton.next_power_of_2(layout.num_rows)),
        BLOCK_N=decode_tile_config(gpu, shape, plan.block_rows).keys,
        SHARED=layout.shared is not None,
        WINDOW=shape.window is not None,
        num_warps=4 if layout.num_rows <= 1024 else 8,
    )
