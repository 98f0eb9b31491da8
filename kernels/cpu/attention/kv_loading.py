"""Loads one block of 64 cached positions from a row's pages, in the layout that the products of `kv_block` read.

With bfloat16 products, keys are multiplied where they lie if pages hold one token and follow each other, and values are
packed in pairs; int8 keys and values are widened first, unless AVX-512 VNNI multiplies them. Without bfloat16 products
both are widened to float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.cpu.attention import kv_layout
from plait.kernels.cpu.attention.isa import AMX, F32, INT8_VNNI
from plait.kernels.cpu.attention.kv_layout import KV_BLOCK
from plait.kernels.cpu.attention.products import f32_kernel, int8_vnni_kernel
from plait.kernels.cpu.attention.products.int8_vnni_kernel import QUAD
from plait.kernels.cpu.attention.workspace import AttentionWorkspace, float32_array, int32_array, int64_array


class KvSource(NamedTuple):
    """The addresses of a row's page table and of one key head's part of the cache."""

    pages: int  # int32, the row's page table
    shift: int  # a page holds 1 << shift positions
    stride: int  # bytes from one slot to the next
    keys: int
    values: int
    scale: int  # bytes from a head's int8 numbers to their scale; 0: bfloat16


def _slot_offset(position: int, source: KvSource) -> Any:
    """Returns the byte offset of a position's slot in the key cache and in the value cache."""
    page = int(int32_array(source.pages, 1 << 30)[position >> source.shift])
    return ((page << source.shift) + (position & ((1 << source.shift) - 1))) * source.stride


def prefetch_block(isa: int, base: int, count: int, channels: int, source: KvSource) -> None:
    """Prefetches a block's keys and values: the bytes of `channels` bfloat16 of each position, maybe of several heads.

    Positions whose first and last slot lie as far apart as consecutive slots would are taken for one run.
    """
    offset, run = _slot_offset(base, source), int(count)
    if _slot_offset(base + count - 1, source) != offset + (count - 1) * source.stride:
        run = 1
    for cache in (source.keys, source.values):
        for j in range(0, count, run):
            address = cache + _slot_offset(base + j, source)
            if isa == AMX:
                kv_layout.prefetch_rows(address, source.stride, run, channels)
            else:
                kv_layout.touch_rows(address, source.stride, run, channels)


def load_row_bf16(address: int, scale: int, head_dim: int, out: int) -> None:
    """Copies a head's numbers [D] to bfloat16; `scale` as in `KvSource`."""
    if scale:
        kv_layout.int8_to_bf16(address, address + scale, out, head_dim // 32)
    else:
        kv_layout.copy(address, out, head_dim // 32)


def _load_block_f32(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> None:
    """Loads a block into the workspace as float32: keys transposed, values as they are."""
    head_dim, kv_addresses = ws.head_dim, int64_array(ws.kv_addresses, KV_BLOCK)
    for j in range((count + 15) // 16 * 16):  # positions beyond `count` repeat the last key
        offset = _slot_offset(base + min(j, count - 1), source)
        kv_addresses[j] = source.keys + offset
        if source.scale:
            kv_addresses[j] = ws.value_copies + 2 * j * head_dim
            load_row_bf16(source.keys + offset, source.scale, head_dim, ws.value_copies + 2 * j * head_dim)
        if j < count:
            target = ws.values + 4 * j * head_dim
            if source.scale:
                values = source.values + offset
                kv_layout.int8_to_f32(values, values + source.scale, target, head_dim // 16)
            else:
                kv_layout.bf16_to_f32(source.values + offset, target, head_dim // 16)
    for j in range(0, count, 16):
        for channel in range(0, head_dim, 32):
            f32_kernel.transpose_keys(ws.kv_addresses + 8 * j, 2 * channel, ws.keys + 4 * (channel * KV_BLOCK + j))
    if count % 2:
        kv_layout.zero_floats(ws.values + 4 * count * head_dim, head_dim // 16)


def _is_contiguous(base: int, count: int, source: KvSource) -> Any:
    """Returns whether the block's slots are consecutive, with enough memory behind them to fill its last chunk."""
    if source.shift:
        return False
    pages, first = int32_array(source.pages, 1 << 30), base + count // 32 * 32
    if first > base and not kv_layout.are_consecutive(source.pages + 4 * base, count // 32):
        return False
    for position in range(first, base + count):
        if pages[position] != pages[base] + position - base:
            return False
    return source.keys + _slot_offset(base, source) + (count + 31) // 32 * 32 * source.stride <= source.values


def _load_block_bf16(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """Packs a block's values into the workspace; returns the address of its keys and the bytes between them.

    Consecutive keys stay in the cache, others are copied. Beyond `count`, keys are undefined and values are zero.
    """
    head_dim, pairs = ws.head_dim, count // 2
    keys: Any = ws.keys
    stride: Any = int(2 * head_dim)
    if not source.scale and _is_contiguous(base, count, source):
        offset = _slot_offset(base, source)
        keys, stride = source.keys + offset, source.stride
        if pairs:
            kv_layout.pack_values(source.values + offset, stride, head_dim, pairs, ws.values)
    else:
        for j in range(count):
            offset = _slot_offset(base + j, source)
            load_row_bf16(source.keys + offset, source.scale, head_dim, keys + j * stride)
            load_row_bf16(source.values + offset, source.scale, head_dim, ws.value_copies + j * stride)
        if pairs:
            kv_layout.pack_values(ws.value_copies, stride, head_dim, pairs, ws.values)
    if count % 2:
        load_row_bf16(source.values + _slot_offset(base + count - 1, source), source.scale, head_dim, ws.value_copies)
        kv_layout.zero_floats(ws.value_copies + 2 * head_dim, head_dim // 32)
        kv_layout.pack_values(ws.value_copies, int(2 * head_dim), head_dim, 1, ws.values + 4 * pairs * head_dim)
        pairs += 1
    missing = (count + 31) // 32 * 16 - pairs
    if missing:
        kv_layout.zero_floats(ws.values + 4 * pairs * head_dim, missing * head_dim // 16)
    return keys, stride


def _load_block_int8(base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """Interleaves a block's int8 values into the workspace, and copies the scales of its keys and values.

    Returns what `_load_block_bf16` returns. Beyond `count`, scales are 0.
    """
    head_dim, quads = ws.head_dim, count // QUAD
    keys: Any = ws.keys
    stride: Any = int(head_dim)
    if _is_contiguous(base, count, source):
        offset = _slot_offset(base, source)
        keys, stride = source.keys + offset, source.stride
        kv_layout.gather_floats(keys + source.scale, stride, ws.key_scales, count)
        kv_layout.gather_floats(source.values + offset + source.scale, stride, ws.value_scales, count)
        if quads:
            int8_vnni_kernel.interleave_values(source.values + offset, stride, head_dim, quads, ws.values)
    else:
        for j in range(count):
            offset = _slot_offset(base + j, source)
            key, value = source.keys + offset, source.values + offset
            kv_layout.copy_halves(key, keys + j * head_dim, head_dim // 32)
            kv_layout.copy_halves(value, ws.value_copies + j * head_dim, head_dim // 32)
            kv_layout.gather_floats(key + source.scale, stride, ws.key_scales + 4 * j, 1)
            kv_layout.gather_floats(value + source.scale, stride, ws.value_scales + 4 * j, 1)
        if quads:
            int8_vnni_kernel.interleave_values(ws.value_copies, int(head_dim), head_dim, quads, ws.values)
    if count % QUAD:  # the rows behind the last position may lie beyond the cache
        for i in range(QUAD):
            value = source.values + _slot_offset(base + min(QUAD * quads + i, count - 1), source)
            kv_layout.copy_halves(value, ws.value_copies + i * head_dim, head_dim // 32)
        target = ws.values + QUAD * quads * head_dim
        int8_vnni_kernel.interleave_values(ws.value_copies, int(head_dim), head_dim, 1, target)
    key_scales, value_scales = float32_array(ws.key_scales, KV_BLOCK), float32_array(ws.value_scales, KV_BLOCK)
    for j in range(count, (count + 31) // 32 * 32):
        key_scales[j] = value_scales[j] = np.float32(0.0)
    int8_vnni_kernel.largest_scale(ws.value_scales, (count + 31) // 32, ws.largest_scales)
    return keys, stride


def load_block(isa: int, base: int, count: int, source: KvSource, ws: AttentionWorkspace) -> Any:
    """Loads a block; returns the address of its keys and the bytes between them, which float32 products do not use."""
    keys = stride = 0
    if isa == F32:
        _load_block_f32(base, count, source, ws)
    elif isa == INT8_VNNI:
        keys, stride = _load_block_int8(base, count, source, ws)
    else:
        keys, stride = _load_block_bf16(base, count, source, ws)
    return keys, stride
