"""Mixture-of-experts operators, compared with their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.reference import batch_invariant_linear, ops


def random_experts(tokens: int, count: int, per_token: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 12, generator=generator)
    weights, expert_ids = torch.rand(tokens, count, generator=generator).topk(per_token)
    gate_up = torch.randn(count, 2 * 7, 12, generator=generator)
    down = torch.randn(count, 12, 7, generator=generator)
    return x, weights, expert_ids, gate_up, down


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_experts_equal_a_loop_over_tokens(tokens, count, data):
    per_token = data.draw(st.integers(1, count))
    x, weights, expert_ids, gate_up, down = random_experts(tokens, count, per_token, tokens)
    expected = torch.zeros_like(x)
    for t in range(tokens):
        for weight, i in zip(weights[t], expert_ids[t].tolist(), strict=True):
            gate, up = (gate_up[i] @ x[t]).chunk(2)
            expected[t] += weight * (down[i] @ (gate * gate.sigmoid() * up))
    for operator in (ops.experts, ops.experts_dense):
        torch.testing.assert_close(operator(x, weights, expert_ids, gate_up, down), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("operator", [ops.experts, ops.experts_dense])
def test_infinite_weights_of_an_unselected_expert_do_not_affect_a_token(operator):
    x, weights, expert_ids, gate_up, down = random_experts(6, 4, 2, 0)
    down[3] = float("inf")
    result = operator(x, weights, expert_ids, gate_up, down)
    unaffected = ~(expert_ids == 3).any(1)
    assert unaffected.any()
    assert torch.equal(result[unaffected].isfinite(), torch.ones_like(result[unaffected], dtype=torch.bool))


@pytest.mark.torch_threads
def test_deterministic_experts_do_not_depend_on_the_batch():
    x, weights, expert_ids, gate_up, down = random_experts(50, 6, 3, 1)
    kernels = select_kernels(torch.device("cpu"), torch.float32, deterministic=True)
    batched = kernels.experts(x, weights, expert_ids, gate_up, down)
    products = kernels.linear(x, gate_up[0], None)
    assert torch.equal(products, batch_invariant_linear.linear(x, gate_up[0], None))
    for t in (0, 17, 49):
        assert torch.equal(kernels.linear(x[t : t + 1], gate_up[0], None)[0], products[t])
        single = kernels.experts(x[t : t + 1], weights[t : t + 1], expert_ids[t : t + 1], gate_up, down)
        assert torch.equal(single[0], batched[t])
