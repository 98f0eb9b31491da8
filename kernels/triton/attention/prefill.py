"""Attention of prompts and prompt chunks over cached pages and each other.

A program takes one KV head and a block of one row's tokens, with all query heads of the group packed into one tile.
Keys that all its tokens see need no masks; only the blocks on the diagonal, and at the far edge of a sliding window,
compare positions. The heaviest tiles, at the ends of rows, start first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.layout import AttentionLayout, AttentionShape
from plait.kernels.triton.attention.inputs import AttentionInputs
from plait.kernels.triton.attention.kv_loop import attend_kv_range, attend_unmasked_kv_range, cache_scale, find_row
from plait.kernels.triton.attention.tile_config import TileConfig, group_size
from plait.kernels.triton.kernel_launch import KernelLaunch


@triton.jit(do_not_specialize=["num_rows", "max_decode_q_len", "window"])
def _prefill_kernel(
    q,
    out,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    kv_pages,
    q_starts,
    kv_starts,
    page_starts,
    num_rows,
    max_decode_q_len,  # rows with at most so many new tokens are left to the decode kernel
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
    OVERLAP: tl.constexpr,  # whether products run under the softmax where all keys are visible
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    row = find_row(q_starts, num_rows, tile, BLOCK_Q)
    q_start = tl.load(q_starts + row)
    q_len = tl.load(q_starts + row + 1) - q_start
    first = (tile - (q_start // BLOCK_Q + row)) * BLOCK_Q
    if (first >= q_len) | (q_len <= max_decode_q_len):
        return
    kv_len = tl.load(kv_starts + row + 1) - tl.load(kv_starts + row)
    pages = kv_pages + tl.load(page_starts + row)
    m = tl.arange(0, BLOCK_M)
    token, heads = first + m // GROUP, head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    real = (m < BLOCK_Q * GROUP) & (token < q_len)
    stored = real[:, None] & (d < D)[None, :]
    token_at = (q_start + token).to(tl.int64)
    q_tile = tl.load(
        q + (token_at * q_token_stride + heads * q_head_stride)[:, None] + d[None, :], mask=stored, other=0
    )
    lowest = kv_len - q_len + first  # the tile's positions are lowest .. highest
    highest = kv_len - q_len + tl.minimum(first + BLOCK_Q, q_len) - 1
    positions = lowest + m // GROUP
    kv_begin, unmasked_begin = 0, 0
    # Keys before kv_begin are visible to no token of the tile. [unmasked_begin, unmasked_end), possibly empty: whole
    # blocks of keys that are visible to all of them.
    if WINDOW:
        kv_begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        unmasked_begin = tl.maximum(highest - window + 1 + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        unmasked_begin = tl.minimum(unmasked_begin, tl.cdiv(highest + 1, BLOCK_N) * BLOCK_N)
    unmasked_end = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, unmasked_begin)
    k_head, v_head = k_cache + head.to(tl.int64) * head_stride, v_cache + head.to(tl.int64) * head_stride
    inner_scale = inner_scale * cache_scale(k_scales, CACHE) if SOFTCAP else inner_scale
    outer_scale = outer_scale if SOFTCAP else outer_scale * cache_scale(k_scales, CACHE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_M], -1e30, tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        begin = kv_begin if phase == 0 else (unmasked_begin if phase == 1 else unmasked_end)
        end = unmasked_begin if phase == 0 else (unmasked_end if phase == 1 else highest + 1)
        if OVERLAP and phase == 1:
            acc, running_max, running_sum = attend_unmasked_kv_range(
                acc,
                running_max,
                running_sum,
                q_tile,
                begin,
                end,
                kv_len,
                pages,
                k_head,
                v_head,
                slot_stride,
                inner_scale,
                outer_scale,
                D,
                BLOCK_D,
                BLOCK_N,
                PAGE_SIZE,
                SOFTCAP,
            )
        else:
            acc, running_max, running_sum = attend_kv_range(
                acc,
                running_max,
                running_sum,
                q_tile,
                positions,
                begin,
                end,
                kv_len,
                pages,
                k_head,
                v_head,
                k_scales + head,
                v_scales + head,
                slot_stride,
                scale_slot_stride,
                inner_scale,
                outer_scale,
                window,
                D,
                BLOCK_D,
                BLOCK_N,
                PAGE_SIZE,
                CACHE,
                phase != 1,
                WINDOW,
                SOFTCAP,
            )
    acc = acc * (cache_scale(v_scales, CACHE) / tl.where(running_sum > 0, running_sum, 1.0))[:, None]
    # Loaded again, so that no addresses stay in registers during the loops.
    q_start = tl.load(q_starts + row, volatile=True)
    token = (tile - (q_start // BLOCK_Q + row)) * BLOCK_Q + m // GROUP
    stored = ((m < BLOCK_Q * GROUP) & (token < q_len))[:, None] & (d < D)[None, :]
    at = ((q_start + token).to(tl.int64) * out_token_stride + heads * out_head_stride)[:, None] + d[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=stored)


def prefill_launch(
    inputs: AttentionInputs,
    layout: AttentionLayout,
    shape: AttentionShape,
    blocks: TileConfig,
    max_decode_q_len: int,
    out: torch.Tensor,
) -> KernelLaunch:
    """Returns the launch that fills `out` [T, H, D] for the rows with more than `max_decode_q_len` new tokens."""
    tiles = len(out) // (blocks.rows // group_size(shape)) + layout.num_rows
    return KernelLaunch(
        _prefill_kernel,
        (shape.num_kv_heads, tiles, 1),
        inputs.q,
        out,
        *inputs.caches,
        layout.kv_pages,
        layout.q_starts,
        layout.kv_starts,
        layout.first_pages,
        layout.num_rows,
        max_decode_q_len,
        *inputs.score_scales,
        shape.window or 0,
        *inputs.q.stride()[:2],
        *out.stride()[:2],
        *inputs.cache_strides,
        OVERLAP=blocks.overlaps and inputs.caches[0].dtype == inputs.q.dtype,
        **inputs.constants(layout, shape, blocks),
    )
