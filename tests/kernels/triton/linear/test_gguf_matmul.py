"""GGUF's blocks of 2 to 6 bits, rearranged for the GPU: the values of the blocks, and the Triton products."""

from __future__ import annotations

import pytest
import reference_matmul as reference
import torch
from gguf_blocks import random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_matmul import dequantize as dequantized
from triton_device import DEVICE, close_enough

from plait.kernels.coded_weights import CODE_BITS, CodedWeight, weight_from_gguf
from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES, dequantize
from plait.kernels.quantized_weights import StackedWeight, concat_outputs, quantize_int4, select_outputs, stack_outputs
from plait.kernels.triton.linear import quantized_linear

names = st.sampled_from(list(CODE_BITS))
dtypes = st.sampled_from([torch.bfloat16, torch.float16])
seeds = st.integers(0, 10**6)


def random_weight(name: str, outs: int, channels: int, seed: int) -> tuple[CodedWeight, torch.Tensor]:
    """A weight, and its values in float32 as the blocks have them."""
    blocks = random_blocks(name, outs, channels, seed)
    return weight_from_gguf(blocks, name, (outs, channels)), dequantize(blocks, name, (outs, channels))


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def channels_of(name: str, blocks: int) -> int:
    return GGUF_BLOCK_SHAPES[name][0] * blocks


@settings(max_examples=40, deadline=None)
@given(names, st.integers(1, 70), st.integers(1, 5), seeds, st.data())
def test_the_values_are_those_of_the_blocks(name, outs, blocks, seed, data):
    weight, expected = random_weight(name, outs, channels_of(name, blocks), seed)
    assert torch.equal(dequantized(weight), expected)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, outs - 1), max_size=70)), dtype=torch.int32, device=DEVICE)
    for rows in (reference.dequantize_rows, quantized_linear.dequantize_rows):
        assert torch.equal(rows(weight, ids, torch.bfloat16), expected[ids.long()].bfloat16())
    assert torch.equal(dequantized(select_outputs(weight, ids.long())), expected[ids.long()])
    assert torch.equal(dequantized(concat_outputs([weight, weight])), torch.cat([expected, expected]))


@settings(max_examples=24, deadline=None)
@given(
    names, st.integers(0, 70), st.sampled_from([1, 63, 130]), st.sampled_from([1, 3, 9]), st.booleans(), dtypes, seeds
)
def test_products_are_those_of_the_dequantized_weight(name, rows, outs, blocks, with_bias, dtype, seed):
    channels = channels_of(name, blocks)
    weight, values = random_weight(name, outs, channels, seed)
    x, bias = randn(rows, channels, dtype=dtype, seed=seed), randn(outs, dtype=dtype, seed=seed + 1) * 20
    exact = x.float() @ values.to(dtype).float().T + bias.float() * with_bias
    for linear in (reference.make_linear(), quantized_linear.linear):
        result = linear(x, weight, bias if with_bias else None).float()
        torch.testing.assert_close(result / channels**0.5, exact / channels**0.5, **close_enough(dtype))


@pytest.mark.parametrize("rows", [9, 3])
def test_weights_in_different_formats_are_multiplied_in_parts(rows, monkeypatch):
    """q and k stored as Q4_K, v as Q6_K and one more in 16 bits, as files mix them; for many rows and for few."""
    monkeypatch.setattr(quantized_linear, "MAX_FUSED_DEQUANT_ROWS", 8)
    monkeypatch.setattr(quantized_linear, "DEQUANT_CHUNK_ELEMENTS", 70 * 256)
    pairs = [random_weight(name, outs, 256, outs) for name, outs in (("Q4_K", 130), ("Q4_K", 70), ("Q6_K", 65))]
    dense = randn(30, 256, dtype=torch.float16, seed=1) / 8
    stacked = stack_outputs([*(weight for weight, _ in pairs), dense])
    assert isinstance(stacked, StackedWeight)
    assert [type(part) for part in stacked.parts] == [CodedWeight, CodedWeight, torch.Tensor]
    x, bias = randn(rows, 256, dtype=torch.float16, seed=2), randn(295, dtype=torch.float16, seed=3)
    values = torch.cat([*(values.half() for _, values in pairs), dense])
    exact = x.float() @ values.float().T + bias.float()
    for linear in (reference.make_linear(), quantized_linear.linear):
        torch.testing.assert_close(linear(x, stacked, bias).float() / 16, exact / 16, **close_enough(torch.float16))


def test_weights_of_one_format_are_stacked_as_one():
    one = quantize_int4(randn(6, 64, dtype=torch.float32, seed=1), 32)
    stacked = stack_outputs([one, one, one])
    assert not isinstance(stacked, (StackedWeight, torch.Tensor)) and len(dequantized(stacked)) == 18


def test_a_wrong_format_or_size_is_refused():
    blocks = random_blocks("Q4_K", 2, 256, 0)
    for name, shape in (("Q4_K", (3, 256)), ("Q8_0", (2, 256)), ("Q4_K", (4, 128)), ("F16", (2, 256))):
        with pytest.raises(ValueError, match=f"do not hold {name} of shape"):
            weight_from_gguf(blocks, name, shape)
