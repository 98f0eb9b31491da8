"""Products of float8 activations and weights: quantization bit by bit, and the product beside the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference_float8 as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_matmul import dequantize_int8
from triton_device import DEVICE, close_enough

from plait.kernels.quantized_weights import Float8Weight, concat_outputs, select_outputs
from plait.kernels.triton.attention.tile_config import GpuSpec
from plait.kernels.triton.linear import float8_matmul, quantized_linear

GROUPS = [None, 64, 128, 256]  # input channels that share a scale of the weight; None: a scale per output
dtypes = st.sampled_from([torch.bfloat16, torch.float16])
seeds = st.integers(0, 10**6)


def random_x(rows: int, channels: int, dtype: torch.dtype, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Activations whose rows and channels have very different sizes; some rows are zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels, generator=generator)
    x *= torch.exp(spread * torch.randn(channels, generator=generator).clamp(-2, 2) / 2)
    x *= torch.exp(torch.randn(rows, 1, generator=generator))
    x[torch.rand(rows, generator=generator) < 0.1] = 0
    return x.to(dtype).to(DEVICE)


def random_weight(outs: int, channels: int, group: int | None, seed: int, block: int = 1) -> Float8Weight:
    """Any finite codes; each `block` outputs have the same scales."""
    generator = torch.Generator().manual_seed(seed + 1)
    codes = torch.randint(0, 256, (outs, channels), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3A
    count = -(-outs // block)
    shape = (count,) if group is None else (-(-channels // group), count)
    scales = (torch.rand(shape, generator=generator) + 0.5) / 64 / channels**0.5
    scales = scales.repeat_interleave(block, dim=-1)[..., :outs].contiguous()
    return Float8Weight(codes.to(DEVICE), scales.to(DEVICE), group or 32, output_block=block)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(1, 1300), st.sampled_from([None, 64, 128]), dtypes, seeds, st.floats(0, 9))
def test_activations_are_rounded_as_in_the_reference(rows, channels, group, dtype, seed, spread):
    x = random_x(rows, channels + 8, dtype, seed, spread)[:, :channels]
    codes, scales = float8_matmul.quantize_activations(x, group)
    expected_codes, expected_scales = reference.quantize_activations(x, group)
    assert torch.equal(scales, expected_scales) and torch.equal(codes, expected_codes)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 500), st.sampled_from([None, 64, 128]), dtypes, seeds)
def test_rounding_is_to_the_nearest_number_of_the_scaled_grid(rows, channels, group, dtype, seed):
    """The largest value of a group becomes 448; of the others none is further off than half a step."""
    x = random_x(rows, channels, dtype, seed).cpu()
    codes, scales = reference.quantize_activations(x, group)
    numbers = codes.view(torch.float8_e4m3fn).float()
    size = group or channels
    of_channels = scales[:, None] if group is None else scales.T.repeat_interleave(size, dim=1)[:, :channels]
    exact = x.float() / of_channels
    step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-6))) - 3)
    assert ((numbers - exact).abs() <= step * 0.5001).all()
    for first in range(0, channels, size):
        part, largest = numbers[:, first : first + size].abs().amax(1), x[:, first : first + size].abs().amax(1)
        assert torch.equal(part, torch.where(largest > 0, 448.0, 0.0))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 140),
    st.sampled_from([1, 63, 130, 260]),
    st.sampled_from([16, 100, 256, 520]),
    st.sampled_from(GROUPS),
    st.sampled_from([1, 64, 128]),
    st.sampled_from([1, 4, 10**6]),
    st.booleans(),
    dtypes,
    seeds,
)
def test_products_equal_the_reference(rows, outs, channels, group, block, sms, with_bias, dtype, seed):
    """`sms`: multiprocessors, which decide about the tile."""
    weight, x = random_weight(outs, channels, group, seed, block), random_x(rows, channels, dtype, seed)
    bias = torch.randn(outs, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE) if with_bias else None
    expected = reference.float8_matmul(x, weight, bias)
    out = torch.full((rows, outs + 3), 7.0, dtype=dtype, device=DEVICE)[:, :outs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_matmul, "gpu_spec", lambda device: GpuSpec(90, sms))
        assert float8_matmul.float8_matmul(x, weight, bias, out) is out
    size = x.float().norm(dim=1, keepdim=True) * dequantize_int8(weight).norm(dim=1) + 1e-3
    torch.testing.assert_close(out.float() / size, expected.float() / size, **close_enough(dtype))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(GROUPS), st.sampled_from([64, 300]), dtypes, seeds)
def test_the_error_is_that_of_rounding_activations(group, channels, dtype, seed):
    """A value of e4m3 has 4 bits, so each is off by at most 1/16 of itself, or 1/448/512 of the largest."""
    weight, x = random_weight(40, channels, group, seed), random_x(9, channels, dtype, seed)
    wide = dequantize_int8(weight)
    exact, found = x.float() @ wide.T, float8_matmul.float8_matmul(x, weight).float()
    bound = (x.float().abs() / 16 + x.float().abs().amax(1, keepdim=True) / 2**18) @ wide.abs().T
    assert ((found - exact).abs() <= bound * 1.001 + exact.abs() * 2.0**-7 + 1e-6).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_row_with_a_value_that_is_no_number_spoils_only_itself(group, value):
    weight, x = random_weight(70, 300, group, 1), random_x(5, 300, torch.bfloat16, 2)
    x[3] = 1.0
    clean = float8_matmul.float8_matmul(x, weight)
    x[3, 170] = value
    for found in (float8_matmul.float8_matmul(x, weight), reference.float8_matmul(x, weight)):
        assert found[3].isnan().all() and torch.equal(found[:3].isnan(), torch.zeros_like(found[:3]).bool())
    assert torch.equal(float8_matmul.float8_matmul(x, weight)[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("group", [None, 128])
def test_large_and_small_values(group):
    """The largest numbers of bfloat16 are finite after scaling; a result too large for float16 is infinite."""
    weight = random_weight(33, 256, group, 3)
    for x in (torch.full((2, 256), 1e36), torch.full((2, 256), 1e-36), torch.zeros(2, 256)):
        narrow = x.to(torch.bfloat16).to(DEVICE)
        found, expected = float8_matmul.float8_matmul(narrow, weight), reference.float8_matmul(narrow, weight)
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-38)
        assert not found.isnan().any()
    assert not float8_matmul.float8_matmul(torch.zeros(2, 256, dtype=torch.float16, device=DEVICE), weight).any()
    large = replace(weight, scales=weight.scales * 1e6)
    half = torch.full((2, 256), 65504.0, dtype=torch.float16, device=DEVICE)
    assert torch.equal(float8_matmul.float8_matmul(half, large), reference.float8_matmul(half, large))
    assert float8_matmul.float8_matmul(half, large).isinf().any()


def test_the_product_is_chosen_by_tokens_device_and_checkpoint(monkeypatch):
    weight = random_weight(32, 128, 128, 0)
    chosen = []
    monkeypatch.setattr(quantized_linear.float8, "float8_matmul", lambda *args: chosen.append(len(args[0])) or args[0])
    most = quantized_linear.MAX_WIDENED_FLOAT8_ROWS
    for capability, rows, made_for_it, expected in (
        (90, most + 1, True, True),
        (90, most, True, False),
        (80, most + 1, True, False),
        (89, most + 1, True, True),
        (90, most + 1, False, False),
    ):
        monkeypatch.setattr(quantized_linear, "gpu_spec", lambda device, c=capability: GpuSpec(c, 100))
        chosen.clear()
        x = random_x(rows, 128, torch.float16, 0)
        quantized_linear.linear(x, replace(weight, quantizes_activations=made_for_it))
        assert chosen == ([rows] if expected else []), (capability, rows, made_for_it)


def test_tiles_fill_the_gpu():
    config = float8_matmul.float8_matmul_config
    gpu = GpuSpec(90, 132)
    assert config(4096, 4096, gpu)[:2] == (128, 128)
    assert config(512, 4096, gpu)[:2] == (128, 128), "128 programs on 132 multiprocessors"
    assert config(384, 4096, gpu)[:2] == (128, 64), "96 programs"
    assert config(65, 4096, gpu)[:2] == (64, 64)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 60)), min_size=1, max_size=3), seeds)
def test_stacked_weights_know_which_outputs_share_scales(parts, seed):
    weights = [random_weight(blocks * 64 + rest, 128, 64, seed + i, 64) for i, (blocks, rest) in enumerate(parts)]
    both = concat_outputs(weights)
    assert isinstance(both, Float8Weight)
    block = both.output_block
    assert all(torch.equal(part, part[:, :1].expand_as(part)) for part in both.scales.split(block, dim=1))
    assert block == 64 if all(rest == 0 for _, rest in parts[:-1]) else block < 64
    assert select_outputs(both, torch.tensor([1, 0])).output_block == 1
    with pytest.raises(ValueError, match="cannot be one weight"):
        concat_outputs([weights[0], replace(weights[0], quantizes_activations=False)])
