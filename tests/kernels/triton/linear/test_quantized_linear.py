"""4-bit and 8-bit weights: quantization, and the Triton products compared with the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference_matmul as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, close_enough

from plait.kernels import coded_weights, quantized_weights
from plait.kernels.gguf_dequantize import dequantize
from plait.kernels.triton.linear import coded_matmul, quantized_linear, quantized_matmul

dtypes = st.sampled_from([torch.bfloat16, torch.float16])
seeds = st.integers(0, 10**6)


def to_device(weight):
    """The weight on the device of the tests."""
    fields = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in vars(weight).items()
    }
    return type(weight)(**fields)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_products_close(result, expected, dtype, channels):
    """Allows the rounding errors of the weights and of one result in a sum of `channels` products."""
    scale = channels**0.5
    torch.testing.assert_close(result.float() / scale, expected.float() / scale, **close_enough(dtype))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 70),
    st.sampled_from([1, 63, 64, 200]),
    st.sampled_from([32, 96, 128, 576, 1000]),
    st.sampled_from([32, 128]),
    st.booleans(),
    st.booleans(),
    dtypes,
    seeds,
)
def test_int4_matmul_equals_the_reference(rows, outs, channels, group, with_minima, with_bias, dtype, seed):
    weight = quantized_weights.quantize_int4(
        randn(outs, channels, dtype=torch.float32, seed=seed), group, with_minima=with_minima
    )
    x = randn(rows, channels + 8, dtype=dtype, seed=seed + 1)[:, :channels]
    bias = randn(outs, dtype=dtype, seed=seed + 2) * 20 if with_bias else None
    expected = reference.coded_matmul(x, weight, bias)
    out = torch.empty_like(expected)
    assert coded_matmul.coded_matmul(x, weight, bias, out) is out
    assert_products_close(out, expected, dtype, channels)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 70),
    st.sampled_from([1, 63, 64, 200]),
    st.sampled_from([1, 64, 576, 1000]),
    st.booleans(),
    dtypes,
    seeds,
)
def test_int8_matmul_equals_the_reference(rows, outs, channels, with_bias, dtype, seed):
    weight = quantized_weights.quantize_int8(randn(outs, channels, dtype=torch.float32, seed=seed))
    x = randn(rows, channels, dtype=dtype, seed=seed + 1)
    bias = randn(outs, dtype=dtype, seed=seed + 2) * 20 if with_bias else None
    assert_products_close(
        quantized_matmul.int8_matmul(x, weight, bias), reference.int8_matmul(x, weight, bias), dtype, channels
    )


def int8_in_blocks(outs: int, channels: int, seed: int) -> quantized_weights.Int8Weight:
    """A weight as in Q8_0: a scale of any magnitude and sign for every 32 inputs."""
    values = torch.randint(-128, 128, (outs, channels), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    scales = randn(channels // 32, outs, dtype=torch.float32, seed=seed) / 70
    return quantized_weights.Int8Weight(values.to(DEVICE), scales.half())


def random_weight(weight_format: str, outs: int, channels: int, seed: int):
    dense = randn(outs, channels, dtype=torch.float32, seed=seed)
    if weight_format == "int8":
        return quantized_weights.quantize_int8(dense)
    if weight_format == "int8 in blocks":
        return int8_in_blocks(outs, channels, seed)
    return quantized_weights.quantize_int4(
        dense, 32 if "32" in weight_format else 128, with_minima="minima" in weight_format
    )


FORMATS = ["int4, 32, minima", "int4, 128", "int8", "int8 in blocks"]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 40), st.sampled_from([1, 65, 130]), st.sampled_from([32, 96, 1056]), dtypes, seeds)
def test_int8_matmul_with_scales_for_blocks_of_32(rows, outs, channels, dtype, seed):
    weight, x = int8_in_blocks(outs, channels, seed), randn(rows, channels, dtype=dtype, seed=seed + 1)
    expected = x.float() @ reference.dequantize_int8(weight).to(dtype).float().T
    assert torch.equal(reference.int8_matmul(x, weight), expected.to(dtype))
    assert_products_close(quantized_matmul.int8_matmul(x, weight), expected.to(dtype), dtype, channels)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 200), st.sampled_from([32, 160]), dtypes, seeds, st.data())
def test_dequantized_rows_equal_the_dequantized_weight(weight_format, outs, channels, dtype, seed, data):
    weight = random_weight(weight_format, outs, channels, seed)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, outs - 1), max_size=70)), dtype=torch.int32, device=DEVICE)
    dense = (reference.dequantize_int8 if "int8" in weight_format else reference.dequantize_coded)(weight).to(dtype)
    assert torch.equal(quantized_linear.dequantize_rows(weight, ids, dtype), dense[ids])
    assert torch.equal(reference.dequantize_rows(weight, ids, dtype), dense[ids])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_path_for_many_rows_equals_the_one_for_few_rows(weight_format, monkeypatch):
    """Above MAX_FUSED_DEQUANT_ROWS the weight is dequantized in chunks of outputs."""
    monkeypatch.setattr(quantized_linear, "DEQUANT_CHUNK_ELEMENTS", 70 * 160)
    weight, bias = random_weight(weight_format, 150, 160, 1), randn(150, dtype=torch.float16, seed=2) * 20
    x = randn(quantized_linear.MAX_FUSED_DEQUANT_ROWS + 1, 160, dtype=torch.float16, seed=3)
    result = quantized_linear.linear(x, weight, bias)
    assert_products_close(result, reference.make_linear()(x, weight, bias), torch.float16, 160)
    assert_products_close(result[:9], quantized_linear.linear(x[:9], weight, bias), torch.float16, 160)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(1, 40)), min_size=1, max_size=3), seeds)
def test_concatenated_weights_keep_their_values(parts, seed):
    weights = [random_weight(weight_format, outs, 160, seed + i) for i, (weight_format, outs) in enumerate(parts)]
    formats = {weight_format for weight_format, _ in parts}
    if len(formats) > 1:
        with pytest.raises(ValueError, match="cannot be one weight"):
            quantized_weights.concat_outputs(weights)
        return
    combined, row_ids = (
        quantized_weights.concat_outputs(weights),
        [torch.arange(outs, device=DEVICE) for _, outs in parts],
    )
    expected = [reference.dequantize_rows(w, ids, torch.float32) for w, ids in zip(weights, row_ids, strict=True)]
    result = reference.dequantize_rows(
        combined, torch.arange(sum(outs for _, outs in parts), device=DEVICE), torch.float32
    )
    assert torch.equal(result, torch.cat(expected))


def test_int4_weights_with_and_without_minima_are_concatenated():
    dense = randn(20, 64, dtype=torch.float32, seed=0)
    both = [quantized_weights.quantize_int4(dense, 32, with_minima=with_minima) for with_minima in (False, True)]
    expected = torch.cat([reference.dequantize_coded(weight) for weight in both])
    assert torch.equal(reference.dequantize_coded(quantized_weights.concat_outputs(both)), expected)


@pytest.mark.parametrize("rows", [1, 65, 130])
def test_split_k_matmul_equals_the_reference(rows):
    weight = quantized_weights.quantize_int4(randn(130, 2048, dtype=torch.float32, seed=0), 128)
    x = randn(rows, 2048, dtype=torch.float16, seed=1)
    bias = randn(130, dtype=torch.float16, seed=2) * 30
    assert (quantized_matmul.quantized_matmul_config(rows, 130, 16).splits > 1) == (rows == 1)
    assert_products_close(
        coded_matmul.coded_matmul(x, weight, bias), reference.coded_matmul(x, weight, bias), torch.float16, 2048
    )


def test_a_row_does_not_depend_on_other_rows():
    weight = quantized_weights.quantize_int4(randn(64, 1024, dtype=torch.float32, seed=0), 32)
    x = randn(16, 1024, dtype=torch.float16, seed=1)
    batched = coded_matmul.coded_matmul(x, weight)
    for row in (0, 7, 15):
        assert torch.equal(coded_matmul.coded_matmul(x[row : row + 1], weight)[0], batched[row])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]), st.integers(1, 5), st.integers(1, 7), seeds)
def test_gguf_blocks_keep_their_values(quantization, outs, blocks, seed):
    generator = np.random.default_rng(seed)
    size, head = {"Q4_0": (18, 2), "Q4_1": (20, 4), "Q8_0": (34, 2)}[quantization]
    raw = generator.integers(0, 256, (outs, blocks, size), dtype=np.uint8)
    raw[..., :head] = generator.normal(size=(outs, blocks, head // 2)).astype(np.float16).view(np.uint8)
    shape = (outs, blocks * 32)
    if quantization == "Q8_0":
        int8 = quantized_weights.int8_from_gguf(torch.from_numpy(raw.copy()), shape)
        expected = dequantize(torch.from_numpy(raw.reshape(outs, -1)), quantization, shape)
        assert torch.equal(reference.dequantize_int8(int8), expected)
        return
    weight = coded_weights.weight_from_gguf(torch.from_numpy(raw.copy()), quantization, shape)
    expected = dequantize(torch.from_numpy(raw.reshape(outs, -1)), quantization, shape)
    assert torch.equal(reference.dequantize_coded(weight), expected)
    assert len(weight.packed) % 2 == 0


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("with_minima", [False, True])
def test_quantization_error_is_at_most_half_a_step(group, with_minima):
    values = randn(24, 200, dtype=torch.float32, seed=3)
    values[0] = 0.0
    weight = quantized_weights.quantize_int4(values, group, with_minima=with_minima)
    step = weight.scales.float().T.abs().repeat_interleave(group, dim=1)[:, :200]
    error = (reference.dequantize_coded(weight) - values).abs()
    # a symmetric scale reaches -8 on one side and 7 on the other
    assert (error <= step * (0.51 if with_minima else 1.01) + 2e-3).all()
    int8 = quantized_weights.quantize_int8(values)
    error = (int8.values.float() * int8.scales[:, None] - values).abs()
    assert (error <= int8.scales[:, None] * 0.501).all()


def test_matmul_configs_have_enough_programs_and_none_without_work():
    for rows in (1, 16, 17, 32, 33, 64, 65, 4096):
        for outs in (64, 576, 4096, 28672, 128_256):
            for pairs in (1, 5, 32, 112):
                plan = quantized_matmul.quantized_matmul_config(rows, outs, pairs)
                assert plan.splits <= max(1, pairs)
                assert plan.block_m >= min(rows, 128)
    assert quantized_matmul.quantized_matmul_config(1, 4096, 32).splits == 8
    assert (
        quantized_matmul.quantized_matmul_config(1, 4096, 32).splits
        == quantized_matmul.quantized_matmul_config(16, 4096, 32).splits
    )


def int4_ones(outs: int = 64, channels: int = 128):
    return quantized_weights.quantize_int4(torch.ones(outs, channels), 32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: coded_matmul.coded_matmul(torch.zeros(2, 64).half(), int4_ones()),
        lambda: coded_matmul.coded_matmul(torch.zeros(2, 128), int4_ones()),
        lambda: coded_matmul.coded_matmul(torch.zeros(2, 128).half(), int4_ones(), torch.zeros(3).half()),
        lambda: coded_matmul.coded_matmul(torch.zeros(2, 128).half(), int4_ones(), None, torch.zeros(2, 64)),
        lambda: quantized_weights.quantize_int4(torch.ones(2, 64), 48),
        lambda: coded_weights.pack_int4(torch.zeros(2, 64), torch.zeros(2, 3), None, 32),
        lambda: coded_weights.weight_from_gguf(torch.zeros(18, dtype=torch.uint8), "Q8_0", (1, 32)),
        lambda: coded_weights.weight_from_gguf(torch.zeros(17, dtype=torch.uint8), "Q4_0", (1, 32)),
        lambda: quantized_weights.int8_from_gguf(torch.zeros(33, dtype=torch.uint8), (1, 32)),
    ],
)
def test_invalid_shapes_raise(call):
    with pytest.raises(ValueError, match=r"expected|take|groups|fit|hold|held"):
        call()
