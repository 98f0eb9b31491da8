"""Triton's norms and gated activations against their references, on random shapes and strides."""

from __future__ import annotations

import pytest
import reference_float32
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, close_enough

from plait.kernels.reference import ops
from plait.kernels.triton import activation, norm

dtypes = st.sampled_from([torch.bfloat16, torch.float16])
seeds = st.integers(0, 2**31)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def norm_weight(channels: int, dtype: torch.dtype, is_float32: bool, seed: int) -> torch.Tensor:
    """A weight in the model's dtype (Llama), or 1 + weight in float32, as Gemma's norms keep it."""
    weight = randn(channels, dtype=torch.float32 if is_float32 else dtype, seed=seed)
    return 1 + weight if is_float32 else weight


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.sampled_from([1, 8, 100, 576, 1000, 4096]), dtypes, st.booleans(), seeds)
def test_norms_with_and_without_residual_equal_the_reference(rows, channels, dtype, is_float32, seed):
    padded = randn(rows, channels + 8, dtype=dtype, seed=seed) * 3
    x = padded[:, :channels]  # strided rows
    weight = norm_weight(channels, dtype, is_float32, seed + 1)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5), **close_enough(dtype))
    residual = randn(rows, channels, dtype=dtype, seed=seed + 2)
    expected_residual = residual.clone()
    out = torch.empty_like(residual)
    result = norm.add_rms_norm(x, residual, weight, 1e-5, out=out)
    expected = reference_float32.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert result is out
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(result, expected, **close_enough(dtype))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.sampled_from([64, 96, 128]), dtypes, st.booleans())
def test_head_norm_in_place_changes_only_those_heads(tokens, heads, size, dtype, is_float32):
    qkv = randn(tokens, heads + 2, size, dtype=dtype, seed=tokens)
    weight = norm_weight(size, dtype, is_float32, 1)
    expected = ops.rms_norm(qkv[:, :heads], weight, 1e-6)
    other_heads = qkv[:, heads:].clone()
    norm.rms_norm(qkv[:, :heads], weight, 1e-6, out=qkv[:, :heads])
    torch.testing.assert_close(qkv[:, :heads], expected, **close_enough(dtype))
    assert torch.equal(qkv[:, heads:], other_heads)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.sampled_from([1, 97, 1024, 2050]), dtypes, st.sampled_from([0.5, 30.0]))
def test_soft_cap_changes_only_those_logits(rows, vocab, dtype, cap):
    logits = 3 * cap * randn(rows, vocab + 3, dtype=dtype, seed=vocab)
    expected = logits.clone()
    expected[:, :vocab] = (cap * torch.tanh(logits[:, :vocab].double() / cap)).to(dtype)
    for soft_cap_in_place in (activation.soft_cap_in_place, ops.soft_cap_in_place):
        capped = logits.clone()
        soft_cap_in_place(capped[:, :vocab], cap)
        torch.testing.assert_close(capped, expected, atol=1e-5 * cap, rtol=1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(capped[:, vocab:], logits[:, vocab:])


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.sampled_from([64, 96, 640]), dtypes, st.booleans())
def test_norm_in_place_changes_only_those_columns(tokens, channels, dtype, is_float32):
    x, weight = randn(tokens, channels + 32, dtype=dtype, seed=tokens), norm_weight(channels, dtype, is_float32, 1)
    for rms_norm_in_place in (norm.rms_norm_in_place, ops.rms_norm_in_place):
        changed = x.clone()
        rms_norm_in_place(changed[:, :channels], weight, 1e-6)
        expected = ops.rms_norm(x[:, :channels], weight, 1e-6)
        torch.testing.assert_close(changed[:, :channels], expected, **close_enough(dtype))
        assert torch.equal(changed[:, channels:], x[:, channels:])


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9), st.sampled_from([8, 100, 640]), dtypes, seeds)
def test_a_float32_weight_is_applied_before_the_only_rounding(rows, channels, dtype, seed):
    x = randn(rows, channels, dtype=dtype, seed=seed)
    weight = norm_weight(channels, dtype, True, seed + 1)
    result, expected = norm.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)
    assert result.dtype == dtype
    # A second rounding would change a quarter of the values.
    assert (result != expected).float().mean() <= 0.02 + 1 / result.numel()


def test_rows_of_the_widest_norm_do_not_depend_on_each_other():
    x = randn(3, norm.MAX_CHANNELS, dtype=torch.bfloat16, seed=0)
    weight = randn(norm.MAX_CHANNELS, dtype=torch.bfloat16, seed=1)
    together = norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(together, ops.rms_norm(x, weight, 1e-5), **close_enough(torch.bfloat16))
    for row in range(3):
        assert torch.equal(norm.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


def test_norm_config_holds_complete_rows_in_at_most_32_registers_per_thread():
    for channels in (1, 15, 16, 17, 64, 128, 576, 2048, 4096, 5120, 8192, 16384):
        config = norm.norm_config(channels)
        assert config.block >= channels
        assert config.block * config.rows <= config.warps * 32 * 32
        assert config.warps in (4, 8, 16)
    for channels in (0, norm.MAX_CHANNELS + 1):
        with pytest.raises(ValueError, match="channels"):
            norm.norm_config(channels)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.sampled_from([1, 7, 576, 1024, 1536]), dtypes, st.booleans(), seeds)
def test_gated_activations_equal_the_reference(rows, channels, dtype, gelu, seed):
    name = "gelu_tanh_and_multiply" if gelu else "silu_and_multiply"
    gate_up = randn(rows, 2 * channels + 16, dtype=dtype, seed=seed)[:, : 2 * channels] * 4
    expected = getattr(reference_float32, name)(gate_up)
    out = torch.empty_like(expected)
    result = getattr(activation, name)(gate_up, out)
    assert result is out
    torch.testing.assert_close(result, expected, **close_enough(dtype))


def test_activations_of_very_large_and_small_gates():
    gate = torch.tensor([-1e4, -80.0, 0.0, 80.0, 1e4], device=DEVICE)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None].half()
    for name in ("gelu_tanh_and_multiply", "silu_and_multiply"):
        result = getattr(activation, name)(gate_up)
        torch.testing.assert_close(result, getattr(reference_float32, name)(gate_up), atol=1e-4, rtol=1e-3)


def test_references_equal_torchs_operators():
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))
    for name in ("gelu_tanh_and_multiply", "silu_and_multiply"):  # equal in float32, where neither rounds more often
        torch.testing.assert_close(getattr(reference_float32, name)(x), getattr(ops, name)(x))


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
def test_invalid_shapes_raise(call):
    with pytest.raises(ValueError, match=r"expected|norm|must be|\[T, C\]"):
        call()
