"""What every attention kernel does inside: finding slots, reading tiles of the cache, online softmax over key blocks.

A tile packs tokens and the query heads of one KV head into the rows of one matrix product, so a key is read once
for the whole group (grouped-query packing, arXiv 2511.11581). Softmax is taken in base 2, log2(e) folded into the
scale (Milakov and Gimelshein 2018; Dao 2023).

Cache kinds: "plain" (the query's dtype or another float), "int8", "fp8" (e4m3, converted by the chip, 8.9 and
newer), "fp8bits" (e4m3 by shifts, for older chips and the interpreter).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter holds bfloat16 as integers, multiplies those in tl.dot, and turns integers into them bit by bit.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def find_row(starts, num_rows, tile, PER_TILE: tl.constexpr):
    """The row (of `starts`, num_rows + 1 sums) that tile number `tile` belongs to, if it belongs to any.

    Row r's tiles begin at starts[r] // PER_TILE + r, which leaves room for every row's last, partial tile.
    """
    found = 0
    for base in range(0, num_rows, 128):
        r = base + tl.arange(0, 128)
        begins = tl.load(starts + r, mask=r < num_rows, other=0) // PER_TILE + r
        found += tl.sum(((r < num_rows) & (begins <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit
def find_slots(pages, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of positions start .. start + BLOCK_N: one number if they lie in one page, else [BLOCK_N]."""
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(pages + start // PAGE_SIZE, mask=start < end, other=0)
        slots = page * PAGE_SIZE + start % PAGE_SIZE
    else:
        at = start + tl.arange(0, BLOCK_N)
        page = tl.load(pages + at // PAGE_SIZE, mask=at < end, other=0)
        slots = page * PAGE_SIZE + at % PAGE_SIZE
    return slots


@triton.jit
def slot_offsets(slots, stride, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets [BLOCK_N] of the slots' rows in a cache, 64 bits wide."""
    if PAGE_SIZE >= BLOCK_N:
        offsets = slots.to(tl.int64) * stride + tl.arange(0, BLOCK_N) * stride
    else:
        offsets = slots.to(tl.int64) * stride
    return offsets


@triton.jit
def load_tile(pointers, mask, MASKED: tl.constexpr):
    tile = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    return tile


@triton.jit
def dequantize_tile(tile, dtype: tl.constexpr, CACHE: tl.constexpr):
    """A tile of the cache as `dtype`. "fp8bits" gives the value over 256 (see `cache_scale`)."""
    if CACHE == "fp8":
        floats = tile.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CACHE == "fp8bits":
        wide = tile.to(tl.uint16)  # sign, 4 bits of exponent, 3 of mantissa: float16's with the exponent 8 too low
        floats = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    elif INTERPRETED:
        floats = tile.to(tl.float32).to(dtype)
    else:
        floats = tile.to(dtype)
    return floats


@triton.jit
def cache_scale(scales, CACHE: tl.constexpr):
    """What the whole cache's numbers are multiplied by."""
    if CACHE == "fp8":
        factor = tl.load(scales)
    elif CACHE == "fp8bits":
        factor = tl.load(scales) * 256.0
    else:
        factor = 1.0
    return factor


@triton.jit
def dot(a, b, acc):
    """acc + a @ b; float32 as sums of three tf32 products, about as exact as float32's own (Ootomo and Yokota 2022)."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def prefix_split_len(shared, max_splits, ALIGN: tl.constexpr):
    """Keys of one piece of a shared prefix cut into max_splits at most."""
    return tl.maximum(tl.cdiv(tl.cdiv(shared, max_splits), ALIGN), 1) * ALIGN


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def attend_kv_range(
    acc,  # [BLOCK_M, BLOCK_D] float32
    running_max,  # [BLOCK_M] the highest score so far, base 2
    running_sum,  # [BLOCK_M] the sum of weights so far
    q,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M]
    kv_begin,  # a multiple of BLOCK_N
    kv_end,
    kv_len,
    pages,  # of this row
    k_cache,  # of this head, as v_cache and the scales
    v_cache,
    k_scales,
    v_scales,
    slot_stride,  # elements from slot to slot
    scale_stride,
    inner_scale,  # scores are inner * q.k; with SOFTCAP tanh of that, times outer
    outer_scale,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    MASKED: tl.constexpr,  # whether some key of [lo, hi) may be hidden from some row, or lie past kv_len
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Goes over the keys [lo, hi), a block at a time; the pages of the next block are looked up a block ahead."""
    d = tl.arange(0, BLOCK_D)
    inside = (d < D)[None, :]
    slots = find_slots(pages, kv_begin, kv_len, PAGE_SIZE, BLOCK_N)
    for start in range(kv_begin, kv_end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        exists = (at < kv_len)[:, None] & inside
        offsets = slot_offsets(slots, slot_stride, PAGE_SIZE, BLOCK_N)[:, None] + d[None, :]
        k = load_tile(k_cache + offsets, inside, BLOCK_D > D)
        v = load_tile(v_cache + offsets, exists if MASKED else inside, MASKED or BLOCK_D > D)
        scores = dot(q, tl.trans(dequantize_tile(k, q.dtype, CACHE)), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if CACHE == "int8":
            scale_at = slot_offsets(slots, scale_stride, PAGE_SIZE, BLOCK_N)
            scores = scores * load_tile(k_scales + scale_at, at < kv_len, MASKED)[None, :]
            v_factors = load_tile(v_scales + scale_at, at < kv_len, MASKED)
        slots = find_slots(pages, start + BLOCK_N, kv_len, PAGE_SIZE, BLOCK_N)
        if SOFTCAP:
            scores = tanh(scores * inner_scale)
        if MASKED:
            seen = at[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (at[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * outer_scale)
        weights = tl.exp2(scores * outer_scale - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if CACHE == "int8":
            weights = weights * v_factors[None, :]
        acc = dot(weights.to(q.dtype), dequantize_tile(v, q.dtype, CACHE), acc)
        running_max = new_max
    return acc, running_max, running_sum
