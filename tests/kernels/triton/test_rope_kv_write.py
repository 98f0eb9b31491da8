"""The fused norm, rotary embedding and KV write against the reference: in the interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_device as kernel_device
from attention_cases import FP8, i32, layout_of, on
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_fused import rotate_and_write

from plait.kernels.kv_cache import LayerCache
from plait.kernels.reference.ops import dequantize_kv
from plait.kernels.triton import rope_kv_write

DEVICE = kernel_device.DEVICE.type
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}


def caches(cache: torch.dtype, slots: int, groups: int, dim: int) -> LayerCache:
    tensors, scales = [], []
    for scale in (0.01, 0.02):
        tensors.append(torch.zeros(slots, groups, dim, device=DEVICE).to(cache))
        if cache == FP8:
            scales.append(torch.tensor([scale], device=DEVICE))
        elif cache == torch.int8:
            scales.append(torch.zeros(slots, groups, device=DEVICE))
    return LayerCache(*tensors, *scales)


def dequantized(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The contents of a cache as float32."""
    return dequantize_kv(cache, torch.arange(len(cache), device=DEVICE), scale)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=4),
    st.sampled_from(
        [(1, 1, 64, 64), (8, 2, 64, 32), (3, 3, 80, 32), (16, 1, 96, 96), (7, 1, 128, 128), (2, 2, 256, 64)]
    ),
    st.sampled_from(
        [(F32, F32), (BF16, BF16), (F16, F16), (BF16, FP8), (F32, FP8), (F16, torch.int8), (F32, torch.int8)]
    ),
    st.booleans(),
    st.sampled_from([1, 16]),
)
def test_rope_and_kv_write_equal_the_reference(rows, heads, dtypes, norm, page_size):
    (num_heads, groups, dim, rotary_dim), (dtype, cache) = heads, dtypes
    layout, pages = layout_of(rows, page_size)
    layout = on(DEVICE, layout)
    layout.write_slots[0] = -1  # padding
    generator = torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)  # noqa: E731
    qkv = (random(len(layout.positions), num_heads + 2 * groups, dim) * 1.5).to(dtype)
    angles = random(64, rotary_dim // 2)
    weights = [(1 + random(dim) / 4).to(dtype) for _ in range(2)]
    head_norm = torch.stack([weights[0]] * num_heads + [weights[1]] * groups) if norm else None
    outs, stores = [], []
    for operator in (rotate_and_write, rope_kv_write.rotate_and_write):
        stores.append(caches(cache, pages * page_size, groups, dim))
        outs.append(operator(qkv, angles.cos(), angles.sin(), stores[-1], layout, head_norm, 1e-5))
    torch.testing.assert_close(outs[1], outs[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for i in range(2):  # keys, values
        expected, result = (dequantized(store[i], store[2 + i]) for store in stores)
        step = TOLERANCE[dtype]  # adjacent 8-bit numbers are equal up to rounding
        if cache == FP8:
            torch.testing.assert_close(result, expected, atol=step, rtol=0.13)
        else:
            torch.testing.assert_close(result, expected, atol=step + (0.1 if cache == torch.int8 else 0), rtol=step)
        if dtype != BF16 or DEVICE == "cuda":  # the interpreter truncates bfloat16 where a GPU rounds
            same = (result - expected).abs() <= 1e-6 + 1e-5 * expected.abs()
            assert same.float().mean() > 0.97


def test_rounding_to_fp8_equals_torch():
    """Unrotated keys, with values at, between and beyond all numbers of float8_e4m3fn."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([numbers, ties, ties * (1 + 1e-6), ties * (1 - 1e-6), torch.tensor([449.0, 1e4, -1e30, 1e-12])])
    x = torch.zeros(-(-len(around) // 64) * 64)
    x[: len(around)] = around
    tokens = len(x) // 64
    qkv = torch.stack([torch.zeros(tokens, 64), x.view(-1, 64), -x.view(-1, 64)], 1).to(DEVICE)
    layout, pages = layout_of([(tokens, 0)])
    cos, sin = torch.ones(tokens, 32, device=DEVICE), torch.zeros(tokens, 32, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    cache = caches(FP8, pages, 1, 64)._replace(k_scale=one, v_scale=one)
    rope_kv_write.rotate_and_write(qkv, cos, sin, cache, on(DEVICE, layout), None, 1e-5)
    slots = layout.write_slots.long()
    for written, sign in ((cache.k, 1.0), (cache.v, -1.0)):
        expected = (sign * x.view(-1, 1, 64)).clamp(-448, 448).to(FP8).float()
        assert torch.equal(written.cpu().view(torch.uint8)[slots].view(FP8).float(), expected)


def test_invalid_shapes_raise():
    layout = replace(layout_of([(1, 0)])[0], write_slots=i32([0]))
    table = torch.ones(4, 32)
    cache, int8 = torch.zeros(9, 2, 64), torch.zeros(9, 2, 64, dtype=torch.int8)
    good = {"qkv": torch.zeros(1, 6, 64), "cos": table, "sin": table, "cache": LayerCache(cache, cache)}
    good |= {"layout": layout, "head_norm": None, "eps": 1e-5}
    for wrong in (
        {"cos": torch.ones(4, 40), "sin": torch.ones(4, 40)},
        {"cache": LayerCache(cache, torch.zeros(9, 3, 64))},
        {"cache": LayerCache(cache, cache, torch.ones(1))},
        {"qkv": torch.zeros(1, 4, 64)},
        {"cache": LayerCache(int8, int8)},
    ):
        with pytest.raises(ValueError, match=r"fit|scale"):
            rope_kv_write.rotate_and_write(**{**good, **wrong})
