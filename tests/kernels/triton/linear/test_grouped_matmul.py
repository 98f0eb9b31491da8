"""Mixture of experts: sort, grouped product and sum, compared with references and with a loop over tokens."""

from __future__ import annotations

import pytest
import reference_experts as experts
import reference_float32
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, close_enough

from plait.kernels.operators import ExpertRouting, max_num_blocks
from plait.kernels.triton.linear import grouped_matmul as grouped

seeds = st.integers(0, 10**6)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_expert_ids(tokens: int, top_k: int, num_experts: int, seed: int, skewed: bool = False) -> torch.Tensor:
    """Expert ids [T, top_k] with some -1; `skewed`: nearly all go to one expert."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts, (tokens, top_k), generator=g)
    if skewed:
        ids = torch.where(torch.rand(tokens, top_k, generator=g) < 0.9, seed % num_experts, ids)
    return ids.int().to(DEVICE)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 40]),
    st.sampled_from([16, 32, 64]),
    st.booleans(),
    seeds,
)
def test_sort_by_expert_equals_the_reference(tokens, top_k, num_experts, block, skewed, seed):
    ids = random_expert_ids(tokens, top_k, num_experts, seed, skewed)
    routing, expected_routing = (
        grouped.sort_by_expert(ids, num_experts, block),
        experts.sort_by_expert(ids, num_experts, block),
    )
    assert torch.equal(routing.block_experts, expected_routing.block_experts)
    used = (expected_routing.block_experts >= 0).repeat_interleave(block)
    assert torch.equal(routing.slots[used], expected_routing.slots[used])
    assert routing[2:] == expected_routing[2:]
    flat = ids.flatten()
    placed = expected_routing.slots[used & (expected_routing.slots < len(flat))]
    assert sorted(placed.tolist()) == (flat >= 0).nonzero().flatten().tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.sampled_from([16, 64, 128]))
def test_max_num_blocks_is_enough_for_every_routing(counts, block):
    needed = sum(-(-count // block) for count in counts)
    assert needed <= max_num_blocks(sum(counts), len(counts), block)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([2, 5]),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([(64, 64), (100, 200), (130, 72)]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    seeds,
)
def test_an_expert_layer_equals_the_reference(tokens, top_k, num_experts, block, sizes, dtype, seed):
    hidden, inner = sizes
    ids = random_expert_ids(tokens, top_k, num_experts, seed)
    x = randn(tokens, hidden, dtype=dtype, seed=seed)
    first = randn(num_experts, 2 * inner, hidden, dtype=dtype, seed=seed + 1) / hidden**0.5
    second = randn(num_experts, hidden, inner, dtype=dtype, seed=seed + 2) / inner**0.5
    routing_weights = randn(tokens, top_k, dtype=torch.float32, seed=seed + 3).softmax(-1)
    routing, expected_routing = (
        grouped.sort_by_expert(ids, num_experts, block),
        experts.sort_by_expert(ids, num_experts, block),
    )
    has_expert = (ids >= 0).flatten()
    a, b = (m.grouped_matmul(x, first, r, top_k) for m, r in ((grouped, routing), (experts, expected_routing)))
    torch.testing.assert_close(a[has_expert], b[has_expert], **close_enough(dtype))
    gated = reference_float32.silu_and_multiply(b)
    gated[~has_expert] = float("nan")  # rows without an expert may hold any value
    a, b = (m.grouped_matmul(gated, second, r, 1) for m, r in ((grouped, routing), (experts, expected_routing)))
    torch.testing.assert_close(a[has_expert], b[has_expert], **close_enough(dtype))
    b[~has_expert] = float("nan")
    combined = grouped.combine_experts(b, routing_weights, ids)
    torch.testing.assert_close(combined, experts.combine_experts(b, routing_weights, ids), **close_enough(dtype))
    for token in range(tokens):
        total = torch.zeros(hidden, device=DEVICE)
        for choice, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                up = reference_float32.silu_and_multiply((first[expert].float() @ x[token].float()).to(dtype)[None])[0]
                total += routing_weights[token, choice] * (second[expert].float() @ up.float())
        torch.testing.assert_close(combined[token].float(), total, atol=6e-2, rtol=6e-2)


def test_the_output_of_a_token_does_not_depend_on_other_tokens():
    ids = random_expert_ids(20, 2, 4, 1)
    x = randn(20, 96, dtype=torch.float16, seed=2)
    weights = randn(4, 64, 96, dtype=torch.float16, seed=3)
    batched = grouped.grouped_matmul(x, weights, grouped.sort_by_expert(ids, 4, 16), 2)
    single = grouped.grouped_matmul(x[7:8], weights, grouped.sort_by_expert(ids[7:8].contiguous(), 4, 16), 2)
    has_expert = ids[7] >= 0
    assert torch.equal(batched[14:16][has_expert], single[has_expert])


def test_block_sizes_grow_with_the_tokens_per_expert():
    assert [grouped.routing_block_size(n, 128) for n in (8, 512, 4096, 8192, 65536)] == [16, 16, 32, 64, 128]
    for block in (16, 32, 64, 128):
        plan = grouped.grouped_matmul_config(block)
        assert plan.block_n % 64 == 0
        assert block * plan.block_n <= plan.warps * 32 * 64


@pytest.mark.parametrize(
    "call",
    [
        lambda: grouped.sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 2, 16),
        lambda: grouped.combine_experts(torch.zeros(4, 8), torch.zeros(3, 2), torch.zeros(3, 2)),
        lambda: grouped.grouped_matmul(
            torch.zeros(3, 8).half(),
            torch.zeros(2, 4, 8).half(),
            ExpertRouting(*[torch.zeros(16)] * 2, 16, 4),
            2,
        ),
        lambda: grouped.grouped_matmul(
            torch.zeros(2, 8), torch.zeros(2, 4, 8), ExpertRouting(*[torch.zeros(16)] * 2, 16, 4), 2
        ),
    ],
)
def test_invalid_shapes_raise(call):
    with pytest.raises(ValueError, match=r"int32|fit|expected|take"):
        call()
