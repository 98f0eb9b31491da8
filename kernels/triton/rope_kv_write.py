"""One kernel between the QKV projection and attention: head norm, rotary embedding, quantization and KV write.

A program takes one token and a block of its heads (queries, then keys, then values), so each value of the projection
is read once and written once. Norm and rotation are computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.operators import qk_norm_weights
from plait.kernels.triton.attention.inputs import FLOAT_DTYPES, cache_kind, cache_tensors
from plait.kernels.triton.attention.tile_config import GpuSpec
from plait.kernels.triton.float8 import to_e4m3

HEADS_PER_PROGRAM = 8


@triton.jit
def _encode(x, factor, CACHE: tl.constexpr, dtype: tl.constexpr):
    """Converts x, times factor [HEADS, 1] if quantized, to the cache's format."""
    if CACHE == "int8":
        y = (x * factor + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to the nearest integer, ties to even
        encoded = y.to(tl.int8)
    elif CACHE == "plain":
        encoded = x.to(dtype)
    else:
        encoded = to_e4m3(x * factor)
    return encoded


@triton.jit
def _abs_max(a, b, c, HAS_REST: tl.constexpr):
    largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    if HAS_REST:
        largest = tl.maximum(largest, tl.max(tl.abs(c), 1))
    return tl.maximum(largest, 1e-20)


@triton.jit
def _store_head(pointers, mask, first, second, rest, d, HALF: tl.constexpr, D: tl.constexpr):
    """Stores the two rotated halves, and the channels that are not rotated."""
    tl.store(pointers + d[0], first, mask=mask & (d[0] < HALF))
    tl.store(pointers + HALF + d[0], second, mask=mask & (d[0] < HALF))
    if 2 * HALF < D:
        tl.store(pointers + 2 * HALF + d[1], rest, mask=mask & (d[1] < D - 2 * HALF))


@triton.jit
def _rope_write_kv_kernel(
    qkv,
    q_out,
    cos,
    sin,
    positions,
    write_slots,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    eps,
    token_stride,
    head_stride,
    table_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    scale_slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated channels
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CACHE: tl.constexpr,
    NORM: tl.constexpr,
):
    REST: tl.constexpr = D - 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    is_q, is_v = h < NUM_HEADS, h >= NUM_HEADS + NUM_KV_HEADS
    real = h < NUM_HEADS + 2 * NUM_KV_HEADS
    i, j = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, BLOCK_REST)[None, :]
    is_rotated = i < HALF
    at = qkv + token * token_stride + h * head_stride
    first = tl.load(at + i, mask=real & is_rotated, other=0).to(tl.float32)
    second = tl.load(at + HALF + i, mask=real & is_rotated, other=0).to(tl.float32)
    rest = tl.zeros([BLOCK_HEADS, BLOCK_REST], tl.float32)
    if REST > 0:
        rest = tl.load(at + 2 * HALF + j, mask=real & (j < REST), other=0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        inv_rms = tl.where(is_v, 1.0, tl.rsqrt(squares / D + eps)[:, None])
        first *= inv_rms * _norm_weights(q_norm, k_norm, i, is_rotated, is_q, is_v)
        second *= inv_rms * _norm_weights(q_norm + HALF, k_norm + HALF, i, is_rotated, is_q, is_v)
        if REST > 0:
            rest *= inv_rms * _norm_weights(q_norm + 2 * HALF, k_norm + 2 * HALF, j, j < REST, is_q, is_v)
    angle_at = tl.load(positions + token).to(tl.int64) * table_stride + i
    c = tl.where(is_v, 1.0, tl.load(cos + angle_at, mask=is_rotated, other=0))
    s = tl.where(is_v, 0.0, tl.load(sin + angle_at, mask=is_rotated, other=0))
    first, second = first * c - second * s, second * c + first * s
    dtype = q_out.dtype.element_ty
    first, second, rest = first.to(dtype), second.to(dtype), rest.to(dtype)
    _store_head(q_out + (token * NUM_HEADS + h) * D, is_q, first, second, rest, (i, j), HALF, D)
    slot = tl.load(write_slots + token + h * 0).to(tl.int64)  # [HEADS, 1]
    is_written = real & (slot >= 0)
    is_k = is_written & (h >= NUM_HEADS) & (h < NUM_HEADS + NUM_KV_HEADS)
    is_v = is_written & is_v
    k_head, v_head = h - NUM_HEADS, h - NUM_HEADS - NUM_KV_HEADS
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    factor = tl.full([BLOCK_HEADS, 1], 1.0, tl.float32)
    if CACHE == "int8":
        largest = _abs_max(first, second, rest, REST > 0)[:, None]
        tl.store(k_scales + slot * scale_slot_stride + k_head, largest / 127.0, mask=is_k)
        tl.store(v_scales + slot * scale_slot_stride + v_head, largest / 127.0, mask=is_v)
        factor = 127.0 / largest
    elif CACHE != "plain":
        factor = tl.where(is_v, 1.0 / tl.load(v_scales), 1.0 / tl.load(k_scales))
    kind: tl.constexpr = k_cache.dtype.element_ty
    first, second = _encode(first, factor, CACHE, kind), _encode(second, factor, CACHE, kind)
    rest = _encode(rest, factor, CACHE, kind)
    _store_head(k_cache + slot * k_slot_stride + k_head * k_head_stride, is_k, first, second, rest, (i, j), HALF, D)
    _store_head(v_cache + slot * v_slot_stride + v_head * v_head_stride, is_v, first, second, rest, (i, j), HALF, D)


@triton.jit
def _norm_weights(q_norm, k_norm, i, inside, is_q, is_v):
    """Returns [HEADS, channels]: the norm weights of queries and keys, 1 for values."""
    of_q = tl.load(q_norm + i, mask=inside, other=0).to(tl.float32)
    of_k = tl.load(k_norm + i, mask=inside, other=0).to(tl.float32)
    return tl.where(is_v, 1.0, tl.where(is_q, of_q, of_k))


def _check_shapes(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises ValueError unless the projection [T, H + 2G, D], the tables [*, half] and the caches [slots, G, D] fit."""
    _, heads, dim = qkv.shape
    groups, half = k.shape[1], cos.shape[1]
    if (
        qkv.dtype not in FLOAT_DTYPES
        or qkv.stride(2) != 1
        or k.shape != v.shape
        or k.shape[2] != dim
        or heads <= 2 * groups
    ):
        raise ValueError(f"a projection {tuple(qkv.shape)} {qkv.dtype} does not fit caches of {tuple(k.shape)}")
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(1) != 1 or not 0 < 2 * half <= dim:
        raise ValueError(f"rotary tables {tuple(cos.shape)} and {tuple(sin.shape)} do not fit heads of {dim}")


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerCache,
    layout: AttentionLayout,
    head_norm: torch.Tensor | None,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implements `RotateAndWriteOp`, in `out` [T, H, D], contiguous, if given.

    Raises ValueError for shapes and strides that do not fit together.
    """
    k, v, k_scales, v_scales = cache_tensors(cache)
    tokens, heads, dim = qkv.shape
    groups, half = k.shape[1], cos.shape[1]
    _check_shapes(qkv, cos, sin, k, v)
    q_norm, k_norm = qk_norm_weights(head_norm, heads - 2 * groups)
    kind = cache_kind(cache.k.dtype, GpuSpec(80, 1))
    out = torch.empty((tokens, heads - 2 * groups, dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    _rope_write_kv_kernel[(tokens, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        qkv,
        out,
        cos,
        sin,
        layout.positions,
        layout.write_slots,
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        k,
        v,
        k_scales,
        v_scales,
        eps,
        *qkv.stride()[:2],
        cos.stride(0),
        *k.stride()[:2],
        *v.stride()[:2],
        k_scales.stride(0) if kind == "int8" else 0,
        NUM_HEADS=heads - 2 * groups,
        NUM_KV_HEADS=groups,
        D=dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * half)),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        CACHE=kind,
        NORM=q_norm is not None,
        num_warps=4,
    )
    return out
