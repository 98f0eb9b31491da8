"""The phases of a decoder's step on a CPU, products apart: each is a number of items that the step's threads share out.

A phase's items may be done in any order by anybody, and what an item computes for a token does not depend on the
other tokens: so a token has the same bits alone, in any batch, in any chunk of its prompt.

Knows: one phase at a time. Must not know: the order of phases, torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.threads import barrier_wait, claim_work, mark_done
from plait.kernels.cpu.vector_ops import address_of

MAX_TILE_LANES = 96  # (token, head) pairs that share the reading of keys and values


class ThreadContext(NamedTuple):
    """Which thread this is, of how many, the counters they share, and this thread's scratch for AMX (0: none)."""

    thread_id: int
    num_threads: int
    counters: int
    scratch: int


class QuantizedActivations(NamedTuple):
    """Activations [T, C] as products read them: 8 bits in blocks of 32, or, where `bf16_tiles` has rows, bfloat16.

    `qvalues` int8 [T, C], `scales` and `block_sums` float32 [T, C / 32]; `bf16_tiles` uint16 [T, C] or [0, C], with room for
    multiples of 16 rows, which lie in the tiles that matrix registers hold: [T / 16, C / 32, 16, 32].
    """

    qvalues: Any
    scales: Any
    block_sums: Any
    bf16_tiles: Any


class AttentionBatch(NamedTuple):
    """`layout.AttentionLayout` in arrays, and tiles of tokens, see `cpu_share`."""

    positions: Any
    q_starts: Any
    kv_starts: Any
    first_pages: Any
    pages: Any
    write_slots: Any
    tiles: Any
    segments: Any
    split_starts: Any
    num_tiles: int
    page_shift: int  # a page holds 1 << page_shift tokens: division would cost more than reading a key


class HeadLayout(NamedTuple):
    """`num_kv_heads` key heads of `head_dim` channels, `q_per_kv` query heads to each."""

    q_per_kv: int
    num_kv_heads: int
    head_dim: int
    scale: float


@numba.njit  # type: ignore[untyped-decorator]
def items_per_claim(items: int, team: ThreadContext) -> int:
    """How many items to claim at once."""
    return max(1, items // (4 * team.num_threads))


@numba.njit  # type: ignore[untyped-decorator]
def quantize_blocks(x: int, out: QuantizedActivations, first: int, count: int) -> None:
    """32 * count float32 at x into `out`, whose blocks are counted through all rows, from block `first` on."""
    if len(out.bf16_tiles):
        blocks = out.scales.shape[1]
        row, block = first // blocks, first % blocks  # not for each: division takes longer than the rest of it
        for i in range(count):
            vector_ops.to_bfloat16(x + 128 * i, bf16_block_address(out, row, block), 2)
            block += 1
            if block == blocks:
                row, block = row + 1, 0
        return
    for place in range(first, first + count):
        vector_ops.quantize_block(
            x + 128 * (place - first),
            address_of(out.qvalues) + 32 * place,
            address_of(out.scales) + 4 * place,
            address_of(out.block_sums) + 4 * place,
        )


@numba.njit  # type: ignore[untyped-decorator]
def bf16_block_address(x: QuantizedActivations, row: int, block: int) -> Any:
    """Where a row's block of `bf16_tiles` lies; those of a tile's further rows follow it."""
    return address_of(x.bf16_tiles) + 64 * (16 * ((row >> 4) * x.scales.shape[1] + block) + (row & 15))


@numba.njit  # type: ignore[untyped-decorator]
def rms_norm_row(x: int, weight: int, eps: float, channels: int, out: int) -> None:
    """RMS norm (Zhang and Sennrich 2019) of float32 at x."""
    square = vector_ops.sum_of_squares(x, channels // 16)
    factor = np.float32(1.0) / np.sqrt(square / np.float32(channels) + np.float32(eps))
    vector_ops.scale_into(x, weight, factor, out, channels // 16)


@numba.njit  # type: ignore[untyped-decorator]
def add_rms_norm(
    team: ThreadContext,
    phase: int,
    x: Any,
    y: Any,
    post: int,
    weight: int,
    eps: float,
    normed: Any,
    out: QuantizedActivations,
) -> None:
    """x += y (itself normed, where `post` is a weight), then the norm of x to `normed`, and rounded to `out`."""
    items, channels = x.shape
    count = items_per_claim(items, team)
    while True:
        first = claim_work(team.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for row in range(first, last):
            x_at, y_at = address_of(x) + 4 * row * channels, address_of(y) + 4 * row * channels
            if post:
                rms_norm_row(y_at, post, eps, channels, y_at)
            vector_ops.add_into(x_at, y_at, channels // 16)
            normed_at = address_of(normed) + 4 * row * channels
            rms_norm_row(x_at, weight, eps, channels, normed_at)
            blocks = channels // 32
            quantize_blocks(normed_at, out, row * blocks, blocks)
        mark_done(team.counters, phase, last - first)
    barrier_wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def apply_rope_and_write_kv(
    team: ThreadContext,
    phase: int,
    qkv: Any,
    bias: int,
    norms: int,
    eps: float,
    cos: Any,
    sin: Any,
    heads: HeadLayout,
    rows: AttentionBatch,
    k_cache: int,
    v_cache: int,
) -> None:
    """Bias, head norms and rotary turns of qkv [T, (H + 2 G) D] in place; keys and values into the caches."""
    items, wide = qkv.shape
    head_dim, count = heads.head_dim, items_per_claim(items, team)
    num_rotated_heads = (heads.q_per_kv + 1) * heads.num_kv_heads
    while True:
        first = claim_work(team.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for token in range(first, last):
            here = address_of(qkv) + 4 * token * wide
            if bias:
                vector_ops.add_into(here, bias, wide // 16)
            place = 2 * rows.positions[token] * head_dim  # bytes: half a head of float32 for each position
            for head in range(num_rotated_heads):
                at = here + 4 * head * head_dim
                if norms:
                    rms_norm_row(at, norms + 4 * head * head_dim, eps, head_dim, at)
                vector_ops.apply_rope(
                    at, address_of(cos) + place, address_of(sin) + place, 2 * head_dim, head_dim // 32
                )
            slot = rows.write_slots[token]
            if slot >= 0:
                parts, to = heads.num_kv_heads * head_dim // 16, 2 * np.int64(slot) * heads.num_kv_heads * head_dim
                keys = here + 4 * heads.q_per_kv * heads.num_kv_heads * head_dim
                vector_ops.to_bfloat16(keys, k_cache + to, parts)
                vector_ops.to_bfloat16(here + 4 * num_rotated_heads * head_dim, v_cache + to, parts)
        mark_done(team.counters, phase, last - first)
    barrier_wait(team.counters, phase, items)
