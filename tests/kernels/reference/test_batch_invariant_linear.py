"""The batch-invariant linear layer: its products, and bits that do not depend on the other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.kernel_selection import select_kernels
from plait.kernels.reference import batch_invariant_linear

SHAPES = [(960, 576), (576, 1536), (97, 64)]


@pytest.mark.torch_threads
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 130), st.integers(0, 129), st.sampled_from(SHAPES), st.sampled_from([torch.bfloat16, torch.float32])
)
def test_bits_of_a_row_do_not_depend_on_the_batch(rows, at, shape, dtype):
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(shape, generator=generator) * 0.1).to(dtype)
    x = torch.randn(rows, shape[1], generator=generator).to(dtype)
    at %= rows
    batched, single = batch_invariant_linear.linear(x, weight), batch_invariant_linear.linear(x[at : at + 1], weight)
    assert torch.equal(batched[at], single[0])
    torch.testing.assert_close(batched, torch.nn.functional.linear(x, weight), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("odd", [None, 1, 17, 31])
def test_blocks_are_padded_if_bits_depend_on_the_number_of_rows(odd, monkeypatch):
    """`odd` is the number of rows for which the product has other bits, or None."""
    block_sizes = []

    def product(x, weight, bias):
        block_sizes.append(len(x))
        exact = torch.stack([weight.double() @ row.double() for row in x]).float()
        return exact + 1e-6 if len(x) == odd else exact

    monkeypatch.setattr(batch_invariant_linear, "torch_linear", product)
    monkeypatch.setattr(batch_invariant_linear, "_needs_padding_cache", {})
    x, weight = torch.randn(70, 8), torch.randn(3, 8)
    expected = batch_invariant_linear.linear(x, weight)
    block_sizes.clear()
    for rows in (1, 17, 31, 32, 49):
        assert torch.equal(batch_invariant_linear.linear(x[:rows], weight), expected[:rows])
    assert block_sizes == ([1, 17, 31, 32, 32, 17] if odd is None else [32] * 6)


def test_bias_is_added():
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    torch.testing.assert_close(batch_invariant_linear.linear(x, weight, bias), x @ weight.T + bias)


def test_deterministic_float16_raises():
    with pytest.raises(ValueError, match="deterministic"):
        select_kernels(torch.device("cpu"), torch.float16, deterministic=True)
    names = select_kernels(torch.device("cpu"), torch.float32, deterministic=True).names
    assert "fixed" in names["matrix products"]
    assert names["attention"] == "LLVM"
