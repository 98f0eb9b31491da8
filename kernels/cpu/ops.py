"""The phases of a decoder step that are not matrix products or attention: norms, quantization, rotary embeddings.

An item of a phase is a token. Items may be computed in any order by any thread, and the result for one token does not
depend on the others: a token has the same bits alone, in any batch, and in any chunk of its prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.kernel_types import AttentionBatch, HeadLayout, LayerKvCache, QuantizedActivations
from plait.kernels.cpu.parallel.threads import ThreadContext, items_per_claim, shared_items
from plait.kernels.cpu.vector_ops import address_of


def quantize_blocks(x: int, out: QuantizedActivations, first: int, count: int) -> None:
    """Rounds 32 * count float32 at address x to `out`, from block `first` on; blocks are numbered through all rows."""
    if len(out.bf16_tiles):
        blocks = out.scales.shape[1]
        row, block = first // blocks, first % blocks  # divided once: a division takes longer than rounding a block
        for i in range(count):
            vector_ops.to_bfloat16(x + 128 * i, bf16_block_address(out, row, block), 2)
            block += 1
            if block == blocks:
                row, block = row + 1, 0
        return
    for index in range(first, first + count):
        vector_ops.quantize_block(
            x + 128 * (index - first),
            address_of(out.quants) + 32 * index,
            address_of(out.scales) + 4 * index,
            address_of(out.block_sums) + 4 * index,
            address_of(out.half_sums) + 4 * index,
        )


def bf16_block_address(x: QuantizedActivations, row: int, block: int) -> Any:
    """Returns the address of a row's block of 32 channels in `bf16_tiles`."""
    tile = (row >> 4) * x.scales.shape[1] + block  # TILE_ROWS is 16; shifts are quicker than divisions
    return address_of(x.bf16_tiles) + 64 * (16 * tile + (row & 15))


def rms_norm_row(x: int, weight: int, eps: float, channels: int, out: int) -> None:
    """Writes the RMS norm (Zhang and Sennrich 2019) of float32 [channels] at x to `out`."""
    square = vector_ops.sum_of_squares(x, channels // 16)
    factor = np.float32(1.0) / np.sqrt(square / np.float32(channels) + np.float32(eps))
    vector_ops.scale_into(x, weight, factor, out, channels // 16)


def add_rms_norm(
    ctx: ThreadContext,
    phase: int,
    x: Any,
    y: Any,
    post: int,
    weight: int,
    eps: float,
    normed: Any,
    out: QuantizedActivations,
) -> None:
    """Adds y to x, both [T, C], and writes the RMS norm of the sum to `normed`, and quantized to `out`.

    If `post` is the address of a weight, y itself is normed first. If `weight` is 0, the sum is not normed.
    """
    items, channels = x.shape
    for row in shared_items(ctx, phase, items, items_per_claim(items, ctx)):
        x_row, y_row = address_of(x) + 4 * row * channels, address_of(y) + 4 * row * channels
        if post:
            rms_norm_row(y_row, post, eps, channels, y_row)
        vector_ops.add_into(x_row, y_row, channels // 16)
        normed_row = address_of(normed) + 4 * row * channels
        if weight:
            rms_norm_row(x_row, weight, eps, channels, normed_row)
        else:
            for channel in range(channels):
                normed[row, channel] = x[row, channel]
        blocks = channels // 32
        quantize_blocks(normed_row, out, row * blocks, blocks)


def copy_rows(ctx: ThreadContext, phase: int, x: Any, out: Any, first_channel: int) -> None:
    """Copies x [T, C] to the channels of `out` from `first_channel` on."""
    items, channels = x.shape
    for row in shared_items(ctx, phase, items, items_per_claim(items, ctx)):
        for channel in range(channels):
            out[row, first_channel + channel] = x[row, channel]


def _write_slot(x: int, heads: HeadLayout, slot: int, scales: int) -> None:
    """Writes the keys or values of a token, float32 [G, D], to a slot (`LayerKvCache`)."""
    head_dim = heads.head_dim
    if scales == 0:
        vector_ops.to_bfloat16(x, slot, heads.num_kv_heads * head_dim // 16)
        return
    for head in range(heads.num_kv_heads):
        channel = head * head_dim
        vector_ops.quantize_row(x + 4 * channel, slot + channel, slot + scales + 4 * head, head_dim // 16)


def _norm_heads(row: int, norms: int, eps: float, first: int, channels: int) -> None:
    """Norms channels [first, first + channels) of a token's queries and keys together, in place."""
    rms_norm_row(row + 4 * first, norms + 4 * first, eps, channels, row + 4 * first)


def apply_rope_and_write_kv(
    ctx: ThreadContext,
    phase: int,
    qkv: Any,
    bias: int,
    norms: int,
    joint_norms: int,
    eps: float,
    cos: Any,
    sin: Any,
    heads: HeadLayout,
    batch: AttentionBatch,
    cache: LayerKvCache,
) -> None:
    """Applies bias, head norms and rotary embeddings to qkv [T, (H + 2 G) D] in place; writes keys and values.

    `bias` and `norms` are addresses; 0: no bias, no head norms. `joint_norms`: 1 if all queries are normed together,
    and all keys; 0 if each head is.
    """
    items, channels = qkv.shape
    head_dim = heads.head_dim
    num_rotated_heads = (heads.q_per_kv + 1) * heads.num_kv_heads
    for token in shared_items(ctx, phase, items, items_per_claim(items, ctx)):
        row = address_of(qkv) + 4 * token * channels
        if bias:
            vector_ops.add_into(row, bias, channels // 16)
        angles = 2 * batch.positions[token] * head_dim  # bytes: a position has D / 2 float32
        if norms and joint_norms:
            num_heads = heads.q_per_kv * heads.num_kv_heads
            _norm_heads(row, norms, eps, 0, num_heads * head_dim)
            _norm_heads(row, norms, eps, num_heads * head_dim, heads.num_kv_heads * head_dim)
        for head in range(num_rotated_heads):
            x = row + 4 * head * head_dim
            if norms and not joint_norms:
                rms_norm_row(x, norms + 4 * head * head_dim, eps, head_dim, x)
            vector_ops.apply_rope(x, address_of(cos) + angles, address_of(sin) + angles, 2 * head_dim, head_dim // 32)
        slot = batch.write_slots[token]
        if slot >= 0:
            offset = int(slot) * cache.slot_bytes
            keys = row + 4 * heads.q_per_kv * heads.num_kv_heads * head_dim
            _write_slot(keys, heads, cache.keys + offset, cache.scales)
            _write_slot(row + 4 * num_rotated_heads * head_dim, heads, cache.values + offset, cache.scales)
