"""The inner loop of all attention kernels: finding slots, loading KV tiles, online softmax over blocks of keys.

A tile packs tokens and the query heads of one KV head into the rows of one matrix product, so a key is read once for
the whole group (grouped-query packing, arXiv 2511.11581). Softmax uses base 2, with log2(e) folded into the scale
(Milakov and Gimelshein 2018; Dao 2023).

CACHE is one of "plain" (float16, bfloat16 or float32), "int8", "fp8" (e4m3 converted by hardware, compute capability
8.9 and newer) and "fp8bits" (e4m3 converted by shifts, for older GPUs and the interpreter).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter stores bfloat16 as integers; tl.dot and casts from integers then need a detour over float32.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def find_row(starts, num_rows, tile, PER_TILE: tl.constexpr):
    """Returns the row of `starts` [num_rows + 1] (prefix sums) that contains tile number `tile`.

    Row r's tiles begin at starts[r] // PER_TILE + r, which leaves room for the last, partial tile of every row. The
    caller checks whether the tile lies within the row.
    """
    num_started = 0
    for base in range(0, num_rows, 128):
        r = base + tl.arange(0, 128)
        begins = tl.load(starts + r, mask=r < num_rows, other=0) // PER_TILE + r
        num_started += tl.sum(((r < num_rows) & (begins <= tile)).to(tl.int32), 0)
    return num_started - 1


@triton.jit
def find_slots(pages, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the slots of positions start .. start + BLOCK_N: the first one if they share a page, else [BLOCK_N]."""
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
    """Returns the int64 element offsets [BLOCK_N] of the slots in a cache."""
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
    """Converts a tile of the cache to `dtype`. "fp8bits" values come out divided by 256, see `cache_scale`."""
    if CACHE == "fp8":
        floats = tile.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CACHE == "fp8bits":
        wide = tile.to(tl.uint16)  # sign, 4 bits of exponent, 3 of mantissa: a float16 whose exponent is 8 too low
        floats = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    elif INTERPRETED:
        floats = tile.to(tl.float32).to(dtype)
    else:
        floats = tile.to(dtype)
    return floats


@triton.jit
def cache_scale(scales, CACHE: tl.constexpr):
    """Returns the factor of all values of the cache."""
    if CACHE == "fp8":
        factor = tl.load(scales)
    elif CACHE == "fp8bits":
        factor = tl.load(scales) * 256.0
    else:
        factor = 1.0
    return factor


@triton.jit
def dot(a, b, acc):
    """Returns acc + a @ b; float32 by three tf32 products, about as exact as float32 (Ootomo and Yokota 2022)."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def prefix_split_len(shared, max_splits, ALIGN: tl.constexpr):
    """Returns the keys per split of a shared prefix of `shared` tokens in at most max_splits splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(shared, max_splits), ALIGN), 1) * ALIGN


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def attend_kv_range(
    acc,  # [BLOCK_M, BLOCK_D] float32
    running_max,  # [BLOCK_M] the largest score so far, base 2
    running_sum,  # [BLOCK_M] the sum of weights so far
    q,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M]
    kv_begin,  # a multiple of BLOCK_N
    kv_end,
    kv_len,
    pages,  # of this row
    k_cache,  # of this KV head, as v_cache and the scales
    v_cache,
    k_scales,
    v_scales,
    slot_stride,  # elements from slot to slot
    scale_stride,
    inner_scale,  # scores are outer * q.k; with SOFTCAP outer * tanh(inner * q.k)
    outer_scale,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    MASKED: tl.constexpr,  # whether some key of [kv_begin, kv_end) may be invisible to some row, or past kv_len
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Accumulates the keys [kv_begin, kv_end) block by block; looks up the pages of the next block ahead of time."""
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
            visible = at[None, :] <= positions[:, None]
            if WINDOW:
                visible = visible & (at[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
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


@triton.jit
def attend_unmasked_kv_range(
    acc,  # as in `attend_kv_range`
    running_max,
    running_sum,
    q,
    kv_begin,
    kv_end,  # a multiple of BLOCK_N
    kv_len,
    pages,
    k_cache,
    v_cache,
    slot_stride,
    inner_scale,
    outer_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """As `attend_kv_range` with keys that all rows see, in a plain cache: softmax under the values' product.

    A block's weights are multiplied by its values in the next iteration, where the product runs while the softmax of
    that iteration is computed (FlashAttention-3, section 3.2, arXiv 2407.08608, overlaps them likewise). Triton leaves
    that product asynchronous only in this order: scores, which are waited for; the sum rescaled; the product. The loop
    runs at least once, and changes nothing if [kv_begin, kv_end) is empty: with a branch around it, the accumulators
    have two definitions, and ptxas waits for each product before the next one (C7515, Triton 3.6.0).
    """
    d = tl.arange(0, BLOCK_D)
    inside = (d < D)[None, :]
    weights = tl.zeros([q.shape[0], BLOCK_N], tl.float32)  # of the block before
    rescale = tl.full([q.shape[0]], 1.0, tl.float32)
    v_slots = find_slots(pages, kv_begin, kv_len, PAGE_SIZE, BLOCK_N)
    k_slots = v_slots
    there = kv_begin < kv_end
    for start in range(kv_begin, tl.maximum(kv_end, kv_begin + BLOCK_N), BLOCK_N):
        k_offsets = slot_offsets(k_slots, slot_stride, PAGE_SIZE, BLOCK_N)[:, None] + d[None, :]
        v_offsets = slot_offsets(v_slots, slot_stride, PAGE_SIZE, BLOCK_N)[:, None] + d[None, :]
        k = tl.load(k_cache + k_offsets, mask=inside & there, other=0)
        v = tl.load(v_cache + v_offsets, mask=inside & there, other=0)
        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        acc = acc * rescale[:, None]
        acc = dot(weights.to(q.dtype), v, acc)
        if SOFTCAP:
            scores = tanh(scores * inner_scale)
        new_max = tl.where(there, tl.maximum(running_max, tl.max(scores, 1) * outer_scale), running_max)
        weights = tl.where(there, tl.exp2(scores * outer_scale - new_max[:, None]), 0.0)
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        running_max = new_max
        v_slots = find_slots(pages, start, kv_len, PAGE_SIZE, BLOCK_N)
        k_slots = find_slots(pages, start + BLOCK_N, kv_len, PAGE_SIZE, BLOCK_N)
    v_offsets = slot_offsets(v_slots, slot_stride, PAGE_SIZE, BLOCK_N)[:, None] + d[None, :]
    v = tl.load(v_cache + v_offsets, mask=inside & (kv_begin < kv_end), other=0)
    acc = dot(weights.to(q.dtype), v, acc * rescale[:, None])
    return acc, running_max, running_sum
