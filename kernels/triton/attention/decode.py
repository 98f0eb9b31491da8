"""Attention of decode rows (one new token, or a short draft) over paged KV: split along the keys, merged in place.

One program per work item of the plan and KV head reads its keys once for all query heads of the group. An unsplit row
writes its result. Otherwise each split writes normalized sums and their log-sum-exp, and the split of a row that comes
last merges them, together with those of the shared prefix (flash-decoding, Dao et al. 2023; cascade, Ye et al. 2024).
The order of the sums does not depend on which one that is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.layout import SHARED_ALIGN, AttentionLayout, SplitKVPlan
from plait.kernels.triton.attention.inputs import AttentionInputs
from plait.kernels.triton.attention.kv_loop import attend_kv_range, cache_scale, prefix_split_len
from plait.kernels.triton.attention.tile_config import decode_tile_config, gpu_spec, padded_dim
from plait.kernels.triton.kernel_launch import KernelLaunch


@triton.jit(do_not_specialize=["num_rows", "window", "num_shared_tokens", "max_splits"])
def _decode_kernel(
    q,
    out,
    partial_out,
    partial_lse,
    arrivals,  # [R, G] int32: splits that have written their sums; 0 before and after
    prefix_out,
    prefix_lse,
    shared_lens,
    shared_token_offsets,
    num_shared_tokens,
    max_splits,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    kv_pages,
    work_items,
    row_item_starts,
    num_rows,
    inner_scale,
    outer_scale,
    window,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    slot_stride,
    head_stride,
    scale_slot_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head, number = tl.program_id(0), tl.program_id(1)
    if number >= tl.load(row_item_starts + num_rows):
        return
    item = work_items + number * 8
    q_start, q_len, kv_len = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    pages_at, kv_begin, kv_end, is_unsplit = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    m = tl.arange(0, BLOCK_M)
    token, q_head_in_group = m // GROUP, m % GROUP
    d = tl.arange(0, BLOCK_D)
    stored = (token < q_len)[:, None] & (d < D)[None, :]
    token_at = (q_start + token).to(tl.int64)
    heads = head * GROUP + q_head_in_group
    q_tile = tl.load(
        q + (token_at * q_token_stride + heads * q_head_stride)[:, None] + d[None, :], mask=stored, other=0
    )
    acc, running_max, running_sum = attend_kv_range(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], -1e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        q_tile,
        kv_len - q_len + token,
        kv_begin,
        kv_end,
        kv_len,
        kv_pages + pages_at,
        k_cache + head.to(tl.int64) * head_stride,
        v_cache + head.to(tl.int64) * head_stride,
        k_scales + head,
        v_scales + head,
        slot_stride,
        scale_slot_stride,
        inner_scale * cache_scale(k_scales, CACHE) if SOFTCAP else inner_scale,
        outer_scale if SOFTCAP else outer_scale * cache_scale(k_scales, CACHE),
        window,
        D,
        BLOCK_D,
        BLOCK_N,
        PAGE_SIZE,
        CACHE,
        True,
        WINDOW,
        SOFTCAP,
    )
    acc = acc * (cache_scale(v_scales, CACHE) / tl.where(running_sum > 0, running_sum, 1.0))[:, None]
    # Loaded again, so that no addresses stay in registers during the loop.
    token_at = (tl.load(item + 1, volatile=True) + token).to(tl.int64)
    if is_unsplit:
        at = (token_at * out_token_stride + heads * out_head_stride)[:, None] + d[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=stored)
    else:
        slot = (number * tl.num_programs(0) + head) * BLOCK_M + m
        tl.store(partial_out + slot.to(tl.int64)[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(
            partial_lse + slot,
            tl.where(running_sum > 0, running_max + tl.log2(tl.maximum(running_sum, 1e-30)), float("-inf")),
            mask=token < q_len,
        )
        row = tl.load(item)
        first, end = tl.load(row_item_starts + row), tl.load(row_item_starts + row + 1)
        arrived = arrivals + row * tl.num_programs(0) + head
        tl.debug_barrier()  # all threads have stored their part
        if tl.atomic_add(arrived, 1, sem="acq_rel") == end - first - 1:
            tl.store(arrived, 0)  # for the next layer
            for m_merged in range(0, q_len * GROUP):
                merged = _merge_splits(
                    partial_out,
                    partial_lse,
                    prefix_out,
                    prefix_lse,
                    shared_lens + row,
                    shared_token_offsets + row,
                    first,
                    end,
                    head,
                    m_merged,
                    num_shared_tokens,
                    max_splits,
                    tl.num_programs(0),
                    GROUP,
                    D,
                    BLOCK_D,
                    BLOCK_M,
                    SHARED,
                    ALIGN,
                    SPLITS,
                )
                at = (q_start + m_merged // GROUP).to(tl.int64) * out_token_stride
                at += (head * GROUP + m_merged % GROUP) * out_head_stride
                tl.store(out + at + d, merged.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _merge_splits(
    partial_out,
    partial_lse,
    prefix_out,
    prefix_lse,
    shared_len,
    shared_token_offset,
    first,
    end,
    head,
    m,
    num_shared_tokens,
    max_splits,
    num_kv_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Returns the result [BLOCK_D] of packed row `m` of a tile from the work items [first, end) and the shared prefix.

    Other programs wrote the items' sums in this launch, so they are not read from this multiprocessor's cache.
    """
    d, p = tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    inside = (d < D)[None, :]
    acc = tl.zeros([BLOCK_D], tl.float32)
    running_max = tl.full([], -1e30, tl.float32)
    running_sum = tl.zeros([], tl.float32)
    for base in range(first, end, SPLITS):
        real = base + p < end
        slot = ((base + p) * num_kv_heads + head) * BLOCK_M + m
        lse = tl.load(partial_lse + slot, mask=real, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(
            partial_out + slot.to(tl.int64)[:, None] * D + d[None, :],
            mask=real[:, None] & inside,
            other=0,
            cache_modifier=".cg",
        )
        acc, running_max, running_sum = _merge_partials(acc, running_max, running_sum, sums, lse)
    if SHARED:
        shared, query_head = tl.load(shared_len), head * GROUP + m % GROUP
        shared_slot = tl.load(shared_token_offset) + m // GROUP
        step = prefix_split_len(shared, max_splits, ALIGN)
        for base in range(0, tl.cdiv(shared, step), SPLITS):
            real = (base + p) * step < shared
            slot = ((base + p) * num_shared_tokens + shared_slot) * (num_kv_heads * GROUP) + query_head
            lse = tl.load(prefix_lse + slot, mask=real, other=float("-inf"))
            sums = tl.load(
                prefix_out + slot.to(tl.int64)[:, None] * D + d[None, :], mask=real[:, None] & inside, other=0
            )
            acc, running_max, running_sum = _merge_partials(acc, running_max, running_sum, sums, lse)
    return acc / running_sum


@triton.jit
def _merge_partials(acc, running_max, running_sum, sums, lse):
    """Merges splits (sums [SPLITS, BLOCK_D], lse [SPLITS]) into the accumulated result."""
    new_max = tl.maximum(running_max, tl.max(lse, 0))
    weights = tl.exp2(lse - new_max)
    rescale = tl.exp2(running_max - new_max)
    return acc * rescale + tl.sum(sums * weights[:, None], 0), new_max, running_sum * rescale + tl.sum(weights, 0)


def decode_launch(
    inputs: AttentionInputs, layout: AttentionLayout, plan: SplitKVPlan, out: torch.Tensor
) -> KernelLaunch:
    """Returns the launch that fills `out` [T, H, D] for the rows in the plan.

    For shared prefixes, that of `shared_prefix_launch` runs before it.
    """
    shape, shared = plan.shape, layout.shared
    dim = padded_dim(shape.head_dim)
    return KernelLaunch(
        _decode_kernel,
        (shape.num_kv_heads, len(plan.work_items), 1),
        inputs.q,
        out,
        plan.partial_out,
        plan.partial_lse,
        plan.arrivals,
        plan.partial_out if plan.prefix_out is None else plan.prefix_out,
        plan.partial_lse if plan.prefix_lse is None else plan.prefix_lse,
        plan.row_item_starts if shared is None else shared.lengths,
        plan.row_item_starts if shared is None else shared.token_offsets,
        0 if shared is None else len(shared.tokens),
        1 if plan.prefix_out is None else len(plan.prefix_out),
        *inputs.caches,
        layout.kv_pages,
        plan.work_items,
        plan.row_item_starts,
        layout.num_rows,
        *inputs.score_scales,
        shape.window or 0,
        *inputs.q.stride()[:2],
        *out.stride()[:2],
        *inputs.cache_strides,
        SHARED=shared is not None,
        ALIGN=SHARED_ALIGN,
        SPLITS=16 if dim > 128 else 8192 // max(dim, 128),
        **inputs.constants(layout, shape, decode_tile_config(gpu_spec(out.device), shape, plan.block_rows)),
    )
