"""Attention over prefixes that several rows share: their pages are read once for the whole group.

All new tokens of a group see its whole prefix, so they are packed into tiles as if they were one row's, and the
prefix is cut into pieces that fill the chip. What comes out is merged with each row's own rest by log-sum-exp in
attention_decode (Hydragen, Juravsky et al. 2024; cascade inference, Ye et al. 2024).

Knows: shared prefixes, caches. Must not know: the radix tree that they come from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels.layout import SHARED_ALIGN, AttentionLayout, AttentionPlan, SharedPrefixes
from plait.kernels.triton.attention_blocks import attend, find_row, kind_scale, prefix_step
from plait.kernels.triton.attention_config import chip_of, group_size, padded_dim, prefix_blocks
from plait.kernels.triton.attention_inputs import Inputs


@triton.jit(do_not_specialize=["num_groups", "num_places", "window"])
def _prefix_kernel(
    q,
    prefix_out,  # [pieces, S, H, D]
    prefix_lse,  # [pieces, S, H]
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    kv_pages,
    page_starts,
    positions,
    shared_lens,
    shared_starts,
    shared_tokens,
    leaders,
    num_groups,
    num_places,
    inner,
    outer,
    window,
    q_token_stride,
    q_head_stride,
    slot_stride,
    head_stride,
    scale_slot_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # tiles of one piece run side by side
    shares = find_row(shared_starts, num_groups, tile, BLOCK_Q)
    start = tl.load(shared_starts + shares)
    count = tl.load(shared_starts + shares + 1) - start
    first = (tile - (start // BLOCK_Q + shares)) * BLOCK_Q
    if first >= count:
        return
    leader = tl.load(leaders + shares)
    shared = tl.load(shared_lens + leader)
    step = prefix_step(shared, tl.num_programs(2), ALIGN)
    lo, hi = piece * step, tl.minimum(piece * step + step, shared)
    if lo >= hi:
        return
    m = tl.arange(0, BLOCK_M)
    member, heads = first + m // GROUP, head * GROUP + m % GROUP
    real = (m < BLOCK_Q * GROUP) & (member < count)
    token = tl.load(shared_tokens + start + member, mask=real, other=0)
    at_position = tl.load(positions + token, mask=real, other=0)
    if WINDOW:  # what lies behind the window of the tile's first token is seen by none; all may, and nothing is left
        lowest = tl.min(tl.where(real, at_position, 2147483647), 0)
        lo = tl.maximum(lo, (lowest - window + 1) // BLOCK_N * BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q_at = token.to(tl.int64) * q_token_stride + heads * q_head_stride
    acc, peak, total = attend(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], -1e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.load(q + q_at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0),
        at_position,
        lo,
        hi,
        hi,
        kv_pages + tl.load(page_starts + leader),
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
        WINDOW,  # without a window nothing of a prefix is hidden, and pieces are whole blocks
        WINDOW,
        SOFTCAP,
    )
    acc = acc * (kind_scale(v_scales, CACHE) / tl.where(total > 0, total, 1.0))[:, None]
    # Read again, so that no addresses are kept in registers through the loop.
    start = tl.load(shared_starts + shares, volatile=True)
    slot = (piece * num_places + start + member) * HEADS + heads
    at = slot.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(prefix_out + at, acc, mask=real[:, None] & (d < D)[None, :])
    tl.store(prefix_lse + slot, tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), float("-inf")), mask=real)


def attend_prefixes(inputs: Inputs, layout: AttentionLayout, shared: SharedPrefixes, plan: AttentionPlan) -> None:
    """Fills the plan's prefix_out and prefix_lse for the members of the groups."""
    shape, num_places = plan.shape, len(shared.tokens)
    group = group_size(shape)
    blocks = prefix_blocks(chip_of(inputs.q.device), shape, num_places)
    if plan.prefix_out is None or plan.prefix_out.shape[1] != num_places:
        raise ValueError(f"the plan has no room for the shared prefixes of {num_shared_tokens} tokens")
    num_groups = len(shared.leaders)
    tiles = num_places // (blocks.rows // group) + num_groups
    _prefix_kernel[(tiles, shape.num_kv_heads, len(plan.prefix_out))](
        inputs.q,
        plan.prefix_out,
        plan.prefix_lse,
        *inputs.caches,
        layout.kv_pages,
        layout.first_pages,
        layout.positions,
        shared.lengths,
        shared.starts,
        shared.tokens,
        shared.leaders,
        num_groups,
        num_places,
        *inputs.factors,
        shape.window or 0,
        *inputs.q.stride()[:2],
        *inputs.cache_strides,
        GROUP=group,
        HEADS=shape.num_heads,
        D=shape.head_dim,
        BLOCK_D=padded_dim(shape.head_dim),
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        PAGE_SIZE=layout.page_size,
        CACHE=inputs.kind,
        WINDOW=shape.window is not None,
        SOFTCAP=inputs.softcap,
        ALIGN=SHARED_ALIGN,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
