"""Attention of narrow rows (one new token, or a short draft) over paged KV: pieces along the keys, then their merge.

First pass: a program per planned piece and KV head reads its keys once for all query heads of the group. A row in
one piece writes its result; else the pieces leave normalized sums and their log-sum-exp, which the second pass
joins, together with what the shared prefix gave (flash-decoding; Ye et al. 2024 for the cascade).

Knows: plans, caches. Must not know: how a plan comes about.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.layout import SHARED_ALIGN, AttentionLayout, AttentionPlan
from plait.kernels.triton.attention_blocks import attend, kind_scale, prefix_step
from plait.kernels.triton.attention_config import chip_of, decode_blocks, group_size, padded_dim
from plait.kernels.triton.attention_inputs import Inputs


@triton.jit(do_not_specialize=["num_rows", "window"])
def _decode_kernel(
    q,
    out,
    partial_out,
    partial_lse,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    kv_pages,
    items,
    row_items,
    num_rows,
    inner,
    outer,
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
):
    head, number = tl.program_id(0), tl.program_id(1)
    if number >= tl.load(row_items + num_rows):
        return
    item = items + number * 8
    q_start, q_len, kv_len = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    pages_at, lo, hi, whole = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    m = tl.arange(0, BLOCK_M)
    token, mate = m // GROUP, m % GROUP
    d = tl.arange(0, BLOCK_D)
    stored = (token < q_len)[:, None] & (d < D)[None, :]
    token_at = (q_start + token).to(tl.int64)
    heads = head * GROUP + mate
    q_tile = tl.load(
        q + (token_at * q_token_stride + heads * q_head_stride)[:, None] + d[None, :], mask=stored, other=0
    )
    acc, peak, total = attend(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], -1e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        q_tile,
        kv_len - q_len + token,
        lo,
        hi,
        kv_len,
        kv_pages + pages_at,
        k_cache + head.to(tl.int64) * head_stride,
        v_cache + head.to(tl.int64) * head_stride,
        k_scales + head,
        v_scales + head,
        slot_stride,
        scale_slot_stride,
        inner * kind_scale(k_scales, CACHE) if SOFTCAP else inner,
        outer if SOFTCAP else outer * kind_scale(k_scales, CACHE),
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
    acc = acc * (kind_scale(v_scales, CACHE) / tl.where(total > 0, total, 1.0))[:, None]
    # Read again, so that no addresses are kept in registers through the loop.
    token_at = (tl.load(item + 1, volatile=True) + token).to(tl.int64)
    if whole:
        at = (token_at * out_token_stride + heads * out_head_stride)[:, None] + d[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=stored)
    else:
        slot = (number * tl.num_programs(0) + head) * BLOCK_M + m
        tl.store(partial_out + slot.to(tl.int64)[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(
            partial_lse + slot,
            tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), float("-inf")),
            mask=token < q_len,
        )


@triton.jit(do_not_specialize=["num_places", "max_pieces"])
def _merge_kernel(
    out,
    partial_out,
    partial_lse,
    prefix_out,
    prefix_lse,
    shared_lens,
    shared_places,
    items,
    row_items,
    num_places,
    max_pieces,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHARED: tl.constexpr,
    ALIGN: tl.constexpr,
    PIECES: tl.constexpr,
):
    query_head, row, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(row_items + row), tl.load(row_items + row + 1)
    if first == end:
        return
    q_start, q_len, whole = (
        tl.load(items + first * 8 + 1),
        tl.load(items + first * 8 + 2),
        tl.load(items + first * 8 + 7),
    )
    if (token >= q_len) | (whole != 0):
        return
    d = tl.arange(0, BLOCK_D)
    p = tl.arange(0, PIECES)
    inside = (d < D)[None, :]
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    head, m = query_head // GROUP, token * GROUP + query_head % GROUP
    for base in range(first, end, PIECES):
        real = base + p < end
        slot = ((base + p) * (HEADS // GROUP) + head) * BLOCK_M + m
        lse = tl.load(partial_lse + slot, mask=real, other=float("-inf"))
        sums = tl.load(partial_out + slot.to(tl.int64)[:, None] * D + d[None, :], mask=real[:, None] & inside, other=0)
        acc, peak, total = _join(acc, peak, total, sums, lse)
    if SHARED:
        shared = tl.load(shared_lens + row)
        place = tl.load(shared_places + row) + token
        step = prefix_step(shared, max_pieces, ALIGN)
        for base in range(0, tl.cdiv(shared, step), PIECES):
            real = (base + p) * step < shared
            slot = ((base + p) * num_places + place) * HEADS + query_head
            lse = tl.load(prefix_lse + slot, mask=real, other=float("-inf"))
            sums = tl.load(
                prefix_out + slot.to(tl.int64)[:, None] * D + d[None, :], mask=real[:, None] & inside, other=0
            )
            acc, peak, total = _join(acc, peak, total, sums, lse)
    at = (q_start + token).to(tl.int64) * out_token_stride + query_head * out_head_stride + d
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _join(acc, peak, total, sums, lse):
    """Adds pieces (sums [PIECES, BLOCK_D], lse [PIECES]) to what was joined so far."""
    higher = tl.maximum(peak, tl.max(lse, 0))
    weights = tl.exp2(lse - higher)
    shrink = tl.exp2(peak - higher)
    return acc * shrink + tl.sum(sums * weights[:, None], 0), higher, total * shrink + tl.sum(weights, 0)


def attend_narrow(inputs: Inputs, layout: AttentionLayout, plan: AttentionPlan, out: torch.Tensor) -> None:
    """Fills `out` [T, H, D] for the rows that the plan covers, the prefix pass of shared rows having run before."""
    shape, chip = plan.shape, chip_of(out.device)
    group, dim = group_size(shape), padded_dim(shape.head_dim)
    blocks = decode_blocks(chip, shape, plan.block_rows)
    _decode_kernel[(shape.num_kv_heads, len(plan.items))](
        inputs.q,
        out,
        plan.partial_out,
        plan.partial_lse,
        *inputs.caches,
        layout.kv_pages,
        plan.items,
        plan.row_items,
        layout.num_rows,
        *inputs.factors,
        shape.window or 0,
        *inputs.q.stride()[:2],
        *out.stride()[:2],
        *inputs.cache_strides,
        GROUP=group,
        D=shape.head_dim,
        BLOCK_D=dim,
        BLOCK_M=plan.block_rows,
        BLOCK_N=blocks.keys,
        PAGE_SIZE=layout.page_size,
        CACHE=inputs.kind,
        WINDOW=shape.window is not None,
        SOFTCAP=inputs.softcap,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    _merge(layout, plan, out)


def _merge(layout: AttentionLayout, plan: AttentionPlan, out: torch.Tensor) -> None:
    shape, shared = plan.shape, layout.shared
    group = group_size(shape)
    most = layout.max_q_len if layout.max_q_len is not None else len(out) - layout.num_rows + 1
    narrow = max(1, min(plan.block_rows // group, most))
    dim = padded_dim(shape.head_dim)
    _merge_kernel[(shape.num_heads, layout.num_rows, narrow)](
        out,
        plan.partial_out,
        plan.partial_lse,
        plan.partial_out if plan.prefix_out is None else plan.prefix_out,
        plan.partial_lse if plan.prefix_lse is None else plan.prefix_lse,
        plan.row_items if shared is None else shared.lengths,
        plan.row_items if shared is None else shared.places,
        plan.items,
        plan.row_items,
        0 if shared is None else len(shared.tokens),
        1 if plan.prefix_out is None else len(plan.prefix_out),
        *out.stride()[:2],
        GROUP=group,
        HEADS=shape.num_heads,
        D=shape.head_dim,
        BLOCK_D=dim,
        BLOCK_M=plan.block_rows,
        SHARED=shared is not None,
        ALIGN=SHARED_ALIGN,
        PIECES=16 if dim > 128 else 8192 // max(dim, 128),
        num_warps=4,
    )
