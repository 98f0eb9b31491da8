"""The operators that only some families need, each against its definition written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.reference import batch_invariant_linear, ops


def test_each_head_is_normed_by_itself():
    x, weight = torch.randn(5, 9, 16)[:, 1:7], torch.randn(6, 16)
    found = ops.head_norm(x, weight, 1e-5)
    for head in range(6):
        torch.testing.assert_close(found[:, head], ops.rms_norm(x[:, head], weight[head], 1e-5))


def test_a_wide_weight_multiplies_before_rounding():
    x, weight = torch.randn(40, 64).bfloat16(), 1 + torch.randn(64) / 300  # bfloat16 has no room for the fractions
    exact = ops.rms_norm(x.double().float(), weight, 1e-6)
    wide, narrow = ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight.bfloat16(), 1e-6)
    assert wide.dtype == narrow.dtype == torch.bfloat16
    assert torch.equal(wide, exact.bfloat16())
    assert (narrow - exact).norm() > 1.2 * (wide - exact).norm()


def test_the_gelu_gate():
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, -1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(ops.gelu_tanh_and_multiply(x), 0.5 * gate * (1 + inner.tanh()) * up)


def routed(tokens: int, count: int, per_token: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 12, generator=generator)
    weights, expert_ids = torch.rand(tokens, count, generator=generator).topk(per_token)
    gate_up = torch.randn(count, 2 * 7, 12, generator=generator)
    down = torch.randn(count, 12, 7, generator=generator)
    return x, weights, expert_ids, gate_up, down


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_experts_by_their_definition(tokens, count, data):
    per_token = data.draw(st.integers(1, count))
    x, weights, expert_ids, gate_up, down = routed(tokens, count, per_token, tokens)
    expected = torch.zeros_like(x)
    for t in range(tokens):
        for weight, i in zip(weights[t], expert_ids[t].tolist(), strict=True):
            gate, up = (gate_up[i] @ x[t]).chunk(2)
            expected[t] += weight * (down[i] @ (gate * gate.sigmoid() * up))
    for operator in (ops.experts, ops.experts_dense):
        torch.testing.assert_close(operator(x, weights, expert_ids, gate_up, down), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("operator", [ops.experts, ops.experts_dense])
def test_an_expert_not_asked_cannot_spoil_a_token(operator):
    x, weights, expert_ids, gate_up, down = routed(6, 4, 2, 0)
    down[3] = float("inf")
    found = operator(x, weights, expert_ids, gate_up, down)
    untouched = ~(expert_ids == 3).any(1)
    assert untouched.any()
    assert torch.equal(found[untouched].isfinite(), torch.ones_like(found[untouched], dtype=torch.bool))


def test_deterministic_experts_do_not_depend_on_company():
    x, weights, expert_ids, gate_up, down = routed(50, 6, 3, 1)
    kernels = select_kernels(torch.device("cpu"), torch.float32, deterministic=True)
    together = kernels.experts(x, weights, expert_ids, gate_up, down)
    products = kernels.linear(x, gate_up[0], None)
    assert torch.equal(products, batch_invariant_linear.linear(x, gate_up[0], None))
    for t in (0, 17, 49):
        assert torch.equal(kernels.linear(x[t : t + 1], gate_up[0], None)[0], products[t])
        alone = kernels.experts(x[t : t + 1], weights[t : t + 1], expert_ids[t : t + 1], gate_up, down)
        assert torch.equal(alone[0], together[t])
