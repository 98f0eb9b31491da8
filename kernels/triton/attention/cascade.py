"""Attention over prefixes that several rows share, whose pages are read once for the whole group.

All new tokens of a group see the whole prefix, so they are packed into tiles as if they belonged to one row, and the
prefix is split to fill the GPU. `decode` merges the partial results with those of each row's own keys by log-sum-exp
(Hydragen, Juravsky et al. 2024; cascade inference, Ye et al. 2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels.layout import SHARED_ALIGN, AttentionLayout, SharedPrefixes, SplitKVPlan
from plait.kernels.triton.attention.inputs import AttentionInputs
from plait.kernels.triton.attention.kv_loop import attend_kv_range, cache_scale, find_row, prefix_split_len
from plait.kernels.triton.attention.tile_config import gpu_spec, group_size, shared_prefix_tile_config
from plait.kernels.triton.kernel_launch import KernelLaunch


@triton.jit(do_not_specialize=["num_groups", "num_shared_tokens", "window"])
def _shared_prefix_kernel(
    q,
    prefix_out,  # [splits, S, H, D]
    prefix_lse,  # [splits, S, H]
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
    leader_rows,
    num_groups,
    num_shared_tokens,
    inner_scale,
    outer_scale,
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
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # tiles of one split run side by side
    group_index = find_row(shared_starts, num_groups, tile, BLOCK_Q)
    start = tl.load(shared_starts + group_index)
    count = tl.load(shared_starts + group_index + 1) - start
    first = (tile - (start // BLOCK_Q + group_index)) * BLOCK_Q
    if first >= count:
        return
    leader = tl.load(leader_rows + group_index)
    shared = tl.load(shared_lens + leader)
    step = prefix_split_len(shared, tl.num_programs(2), ALIGN)
    kv_begin, kv_end = split * step, tl.minimum(split * step + step, shared)
    if kv_begin >= kv_end:
        return
    m = tl.arange(0, BLOCK_M)
    member, heads = first + m // GROUP, head * GROUP + m % GROUP
    real = (m < BLOCK_Q * GROUP) & (member < count)
    token = tl.load(shared_tokens + start + member, mask=real, other=0)
    at_position = tl.load(positions + token, mask=real, other=0)
    if WINDOW:  # keys before the window of the tile's first token are visible to no token; this may leave no keys
        lowest = tl.min(tl.where(real, at_position, 2147483647), 0)
        kv_begin = tl.maximum(kv_begin, (lowest - window + 1) // BLOCK_N * BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q_at = token.to(tl.int64) * q_token_stride + heads * q_head_stride
    acc, running_max, running_sum = attend_kv_range(
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], -1e30, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.load(q + q_at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0),
        at_position,
        kv_begin,
        kv_end,
        kv_end,
        kv_pages + tl.load(page_starts + leader),
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
        WINDOW,  # MASKED: without a window every key is visible, and splits are whole blocks
        WINDOW,
        SOFTCAP,
    )
    acc = acc * (cache_scale(v_scales, CACHE) / tl.where(running_sum > 0, running_sum, 1.0))[:, None]
    # Loaded again, so that no addresses stay in registers during the loop.
    start = tl.load(shared_starts + group_index, volatile=True)
    slot = (split * num_shared_tokens + start + member) * HEADS + heads
    at = slot.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(prefix_out + at, acc, mask=real[:, None] & (d < D)[None, :])
    tl.store(
        prefix_lse + slot,
        tl.where(running_sum > 0, running_max + tl.log2(tl.maximum(running_sum, 1e-30)), float("-inf")),
        mask=real,
    )


def shared_prefix_launch(
    inputs: AttentionInputs, layout: AttentionLayout, shared: SharedPrefixes, plan: SplitKVPlan
) -> KernelLaunch:
    """Returns the launch that fills the plan's prefix_out and prefix_lse for the members of the groups.

    ValueError if they do not fit.
    """
    shape, num_shared_tokens = plan.shape, len(shared.tokens)
    blocks = shared_prefix_tile_config(gpu_spec(inputs.q.device), shape, num_shared_tokens)
    if plan.prefix_out is None or plan.prefix_out.shape[1] != num_shared_tokens:
        raise ValueError(f"the plan was not allocated for shared prefixes of {num_shared_tokens} tokens")
    num_groups = len(shared.leader_rows)
    tiles = num_shared_tokens // (blocks.rows // group_size(shape)) + num_groups
    return KernelLaunch(
        _shared_prefix_kernel,
        (tiles, shape.num_kv_heads, len(plan.prefix_out)),
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
        shared.leader_rows,
        num_groups,
        num_shared_tokens,
        *inputs.score_scales,
        shape.window or 0,
        *inputs.q.stride()[:2],
        *inputs.cache_strides,
        HEADS=shape.num_heads,
        ALIGN=SHARED_ALIGN,
        **inputs.constants(layout, shape, blocks),
    )
