"""Norms and gated activations of the reference operators, compared with their definitions."""

from __future__ import annotations

import torch

from plait.kernels.reference import ops


def test_rms_norm_and_gated_silu_equal_torch():
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(ops.silu_and_multiply(x), gate * gate.sigmoid() * up)


def test_head_norm_normalizes_every_head_separately():
    x, weight = torch.randn(5, 9, 16)[:, 1:7], torch.randn(6, 16)
    result = ops.rms_norm(x, weight, 1e-5)
    for head in range(6):
        torch.testing.assert_close(result[:, head], ops.rms_norm(x[:, head], weight[head], 1e-5))


def test_a_float32_norm_weight_is_applied_before_rounding():
    x, weight = torch.randn(40, 64).bfloat16(), 1 + torch.randn(64) / 300  # the fractions are too fine for bfloat16
    exact = ops.rms_norm(x.double().float(), weight, 1e-6)
    float32_result, bfloat16_result = ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight.bfloat16(), 1e-6)
    assert float32_result.dtype == bfloat16_result.dtype == torch.bfloat16
    assert torch.equal(float32_result, exact.bfloat16())
    assert (bfloat16_result - exact).norm() > 1.2 * (float32_result - exact).norm()


def test_gated_gelu_equals_its_definition():
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, -1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(ops.gelu_tanh_and_multiply(x), 0.5 * gate * (1 + inner.tanh()) * up)
