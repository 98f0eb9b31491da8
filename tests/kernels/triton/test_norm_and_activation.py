"""Norms and gated activations: each Triton kernel against its reference, on random shapes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, close_enough

from plait.kernels.reference import fused, ops
from plait.kernels.triton import activation, norm

dtypes = st.sampled_from([torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**31)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.sampled_from([1, 8, 100, 576, 1000, 4096]), dtypes, st.booleans(), seeds)
def test_norm_with_and_without_the_residual(rows, channels, dtype, unit_offset, seed):
    wide = randn(rows, channels + 8, dtype=dtype, seed=seed) * 3
    x = wide[:, :channels]  # rows apart from one another
    weight = randn(channels, dtype=dtype, seed=seed + 1)
    found = norm.rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    torch.testing.assert_close(found, fused.rms_norm(x, weight, 1e-5, unit_offset=unit_offset), **close_enough(dtype))
    residual = randn(rows, channels, dtype=dtype, seed=seed + 2)
    ours, theirs = residual.clone(), residual.clone()
    out = torch.empty_like(ours)
    found = norm.add_rms_norm(x, ours, weight, 1e-5, unit_offset=unit_offset, out=out)
    expected = fused.add_rms_norm(x, theirs, weight, 1e-5, unit_offset=unit_offset)
    assert found is out
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(found, expected, **close_enough(dtype))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.sampled_from([64, 96, 128]), dtypes, st.booleans())
def test_norm_of_heads_in_place_within_a_wider_tensor(tokens, heads, size, dtype, unit_offset):
    qkv = randn(tokens, heads + 2, size, dtype=dtype, seed=tokens)
    weight = randn(size, dtype=dtype, seed=1)
    expected = fused.rms_norm(qkv[:, :heads], weight, 1e-6, unit_offset=unit_offset)
    untouched = qkv[:, heads:].clone()
    norm.rms_norm(qkv[:, :heads], weight, 1e-6, unit_offset=unit_offset, out=qkv[:, :heads])
    torch.testing.assert_close(qkv[:, :heads], expected, **close_enough(dtype))
    assert torch.equal(qkv[:, heads:], untouched)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9), st.sampled_from([8, 100, 640]), dtypes, seeds)
def test_a_float32_weight_multiplies_before_the_only_rounding(rows, channels, dtype, seed):
    """As Gemma's norms do, whose weights are kept as 1 + weight."""
    x = randn(rows, channels, dtype=dtype, seed=seed)
    weight = 1 + randn(channels, dtype=torch.float32, seed=seed + 1)
    found, expected = norm.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(expected, fused.rms_norm(x, weight, 1e-6), atol=0, rtol=0)
    assert found.dtype == dtype
    assert (found != expected).float().mean() <= 0.02 + 1 / found.numel()  # a second rounding moves a quarter of them


def test_the_widest_norm_and_rows_that_do_not_share():
    x = randn(3, norm.MAX_CHANNELS, dtype=torch.bfloat16, seed=0)
    weight = randn(norm.MAX_CHANNELS, dtype=torch.bfloat16, seed=1)
    together = norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(together, ops.rms_norm(x, weight, 1e-5), **close_enough(torch.bfloat16))
    for row in range(3):
        assert torch.equal(norm.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_norm_plan_holds_every_row_and_few_registers():
    for channels in (1, 15, 16, 17, 64, 128, 576, 2048, 4096, 5120, 8192, 16384):
        plan = norm.norm_config(channels)
        assert plan.block >= channels
        assert plan.block * plan.rows <= plan.warps * 32 * 32
        assert plan.warps in (4, 8, 16)
    for channels in (0, norm.MAX_CHANNELS + 1):
        with pytest.raises(ValueError, match="channels"):
            norm.norm_config(channels)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.sampled_from([1, 7, 576, 1024, 1536]), dtypes, st.booleans(), seeds)
def test_gated_activations(rows, channels, dtype, gelu, seed):
    name = "gelu_tanh_and_multiply" if gelu else "silu_and_multiply"
    gate_up = randn(rows, 2 * channels + 16, dtype=dtype, seed=seed)[:, : 2 * channels] * 4
    expected = getattr(fused, name)(gate_up)
    out = torch.empty_like(expected)
    found = getattr(activation, name)(gate_up, out)
    assert found is out
    torch.testing.assert_close(found, expected, **close_enough(dtype))


def test_activations_at_the_ends_of_the_range():
    gate = torch.tensor([-1e4, -80.0, 0.0, 80.0, 1e4], device=DEVICE)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None].half()
    for name in ("gelu_tanh_and_multiply", "silu_and_multiply"):
        found = getattr(activation, name)(gate_up)
        torch.testing.assert_close(found, getattr(fused, name)(gate_up), atol=1e-4, rtol=1e-3)


def test_references_are_torchs_own():
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))
    torch.testing.assert_close(
        fused.rms_norm(x, weight, 1e-5, unit_offset=True),
        torch.nn.functional.rms_norm(x, (8,), 1 + weight, 1e-5),
    )
    torch.testing.assert_close(fused.silu_and_multiply(x), ops.silu_and_multiply(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda: norm.rms_norm(torch.zeros(2, 4), torch.zeros(5), 1e-5),
        lambda: norm.rms_norm(torch.zeros(4), torch.zeros(4), 1e-5),
        lambda: norm.add_rms_norm(torch.zeros(2, 4), torch.zeros(2, 4).half(), torch.zeros(4), 1e-5),
        lambda: norm.rms_norm(torch.zeros(4, 2).T, torch.zeros(4), 1e-5),
        lambda: activation.silu_and_multiply(torch.zeros(2, 5)),
        lambda: activation.silu_and_multiply(torch.zeros(2, 4), torch.zeros(2, 3)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match=r"expected|norm|must be|\[T, C\]"):
        call()
