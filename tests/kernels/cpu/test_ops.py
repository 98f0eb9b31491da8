"""Norms, rotary embeddings, KV cache writes and bfloat16 rounding on the CPU, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import layout_of
from cpu_attention_batches import attention_batch, row_lengths
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_cache import dequantized_cache
from kernel_calls import compiled_kernel
from quantized_activations import assert_close_int8, bf16_values, counters, empty_bf16, empty_int8

from plait.kernels.cpu import llvm, ops, vector_ops
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.kernel_types import HeadLayout, LayerKvCache
from plait.kernels.cpu.parallel.threads import ThreadContext
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.reference import ops as reference

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")


@compiled_kernel
def add_rms_norm(counters, x, y, post, weight, eps, normed, out):
    ops.add_rms_norm(ThreadContext(0, 1, address_of(counters), 0), 0, x, y, post, weight, eps, normed, out)


@compiled_kernel
def apply_rope_and_write_kv(counters, qkv, bias, norms, joint_norms, cos, sin, heads, batch, keys, values, sizes):
    ctx = ThreadContext(0, 1, address_of(counters), 0)
    cache = LayerKvCache(address_of(keys), address_of(values), 1, sizes[0], sizes[1])
    ops.apply_rope_and_write_kv(ctx, 0, qkv, bias, norms, joint_norms, 1e-5, cos, sin, heads, batch, cache)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans())
def test_add_rms_norm(rows, blocks, with_post, with_norm):
    channels, generator = 32 * blocks, torch.Generator().manual_seed(rows)
    x, y, weight, post = (torch.randn(n, channels, generator=generator) for n in (rows, rows, 1, 1))
    added = x + (reference.rms_norm(y, post[0], 1e-5) if with_post else y)
    expected = reference.rms_norm(added, weight[0], 1e-5) if with_norm else added
    normed, post_address = np.zeros((rows, channels), np.float32), post.data_ptr() if with_post else 0
    address = weight.data_ptr() * with_norm
    for out in (empty_int8(rows, channels), empty_bf16(rows, channels)):
        residual = x.clone()
        add_rms_norm(counters(), residual.numpy(), y.clone().numpy(), post_address, address, 1e-5, normed, out)
        torch.testing.assert_close(residual, added)
        torch.testing.assert_close(torch.from_numpy(normed), expected)
        if len(out.bf16_tiles):
            assert torch.equal(bf16_values(out), torch.from_numpy(normed).bfloat16())
        else:
            assert_close_int8(out, torch.from_numpy(normed))


@pytest.mark.parametrize("by_instruction", [False, True])
def test_rounding_to_bfloat16_is_to_nearest_even(by_instruction, monkeypatch):
    """Subnormal numbers may become zero, as they do in all bfloat16 instructions."""
    monkeypatch.setattr(llvm, "HAS_BF16_DOT", by_instruction and llvm.HAS_BF16_DOT)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    bits[: 1 << 12] &= 0xFFFF8000  # ties
    bits[:16] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 1, *range(0x7FFFFF, 0x800007)]
    rounded, x = np.zeros(len(bits), np.uint16), torch.from_numpy(bits.view(np.float32))
    compiled_to_bfloat16()(bits.view(np.float32), rounded)
    actual, expected = torch.from_numpy(rounded).view(torch.bfloat16), x.bfloat16()
    flushed = (x.abs() < torch.finfo(torch.float32).tiny) & (actual == 0) & (expected != 0)
    torch.testing.assert_close(actual[~flushed], expected[~flushed], rtol=0, atol=0, equal_nan=True)
    assert not flushed.any() or llvm.HAS_BF16_DOT
    assert torch.equal(actual.signbit()[~x.isnan()], x.signbit()[~x.isnan()])


def compiled_to_bfloat16():
    """A fresh function, since intrinsics generate their code when a function that calls them is compiled."""

    @compiled_kernel
    def to_bfloat16(x, out):
        vector_ops.to_bfloat16(address_of(x), address_of(out), len(x) // 16)

    return to_bfloat16


@settings(max_examples=40, deadline=None)
@given(
    row_lengths,
    st.integers(1, 4),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.sampled_from([None, "each head", "joint"]),
    st.integers(0, 100),
)
def test_apply_rope_and_write_kv(rows, q_per_kv, head_dim, with_bias, with_norms, seed):
    layout, slots = layout_of(rows, seed=seed)
    kv_heads, total, generator = 2, int(layout.q_starts[-1]), torch.Generator().manual_seed(seed)
    heads, rotated = HeadLayout(q_per_kv, kv_heads, head_dim, 1.0), (q_per_kv + 1) * kv_heads
    qkv = torch.randn(total, rotated + kv_heads, head_dim, generator=generator)
    angles = torch.randn(1000, head_dim // 2, generator=generator)
    bias = torch.randn(qkv[0].shape, generator=generator)
    norms = torch.randn(rotated, head_dim, generator=generator)
    caches = [torch.zeros(slots, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    layout.write_slots[0] = -1  # this token is not written
    expected = (qkv + bias if with_bias else qkv)[:, :rotated]
    if with_norms == "each head":
        expected = reference.rms_norm(expected, norms, 1e-5)
    elif with_norms == "joint":
        parts = zip(*(x.split([q_per_kv * kv_heads, kv_heads], dim=-2) for x in (expected, norms)), strict=True)
        expected = torch.cat(
            [reference.rms_norm(x.flatten(1), weight.flatten(), 1e-5).view_as(x) for x, weight in parts], dim=1
        )
    positions = layout.positions.long()
    expected = reference.rotary(expected, angles.cos()[positions], angles.sin()[positions])
    actual = qkv.clone().flatten(1)
    norm_inputs = (norms.data_ptr() if with_norms else 0, int(with_norms == "joint"))
    inputs = (bias.data_ptr() * with_bias, *norm_inputs, angles.cos().numpy(), angles.sin().numpy())
    batch, bf16_sizes = attention_batch(layout, 8), (2 * kv_heads * head_dim, 0)
    stored = [cache.view(torch.uint16).numpy() for cache in caches]
    apply_rope_and_write_kv(counters(), actual.numpy(), *inputs, heads, batch, *stored, bf16_sizes)
    actual = actual.view_as(qkv)
    torch.testing.assert_close(actual[:, :rotated], expected, atol=2e-5, rtol=1e-5)
    written = actual[:, q_per_kv * kv_heads :].bfloat16()
    for cache, values in zip(caches, written.split(kv_heads, dim=1), strict=True):
        expected_cache = torch.zeros_like(cache)
        expected_cache[layout.write_slots[1:].long()] = values[1:]
        assert torch.equal(cache, expected_cache)
    in_int8 = [np.zeros((slots, kv_heads * (head_dim + 4)), np.int8) for _ in range(2)]
    int8_sizes = (kv_heads * (head_dim + 4), kv_heads * head_dim)
    apply_rope_and_write_kv(
        counters(), qkv.clone().flatten(1).numpy(), *inputs, heads, batch, *in_int8, int8_sizes
    )  # fmt: skip
    exact = actual[:, q_per_kv * kv_heads :].split(kv_heads, dim=1)
    for cache, values in zip(in_int8, exact, strict=True):
        expected_values = torch.zeros(slots, kv_heads, head_dim)
        expected_values[layout.write_slots[1:].long()] = values[1:]
        error = (dequantized_cache(cache, kv_heads, head_dim) - expected_values).abs()
        assert (error <= 0.501 / 127 * expected_values.abs().amax(-1, keepdim=True)).all()
