"""Dequantization of GGUF blocks, compared bit by bit with the gguf package on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES, dequantize


def gguf_dequantize(raw: np.ndarray, quantization: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[quantization])


@pytest.mark.parametrize("quantization", GGUF_BLOCK_SHAPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_values_equal_the_gguf_package_bit_by_bit(quantization: str, seed: int, rows: int, blocks: int) -> None:
    values, size = GGUF_BLOCK_SHAPES[quantization]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    expected = gguf_dequantize(raw, quantization)
    result = dequantize(torch.from_numpy(raw), quantization, (rows, blocks * values)).numpy()
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(result[is_number].view(np.uint32), expected[is_number].view(np.uint32))
    assert np.isnan(result[~is_number]).all()


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_quantized_by_the_gguf_package_are_restored_approximately(quantization: str) -> None:
    weights = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[quantization]).view(np.uint8)
    restored = dequantize(torch.from_numpy(np.ascontiguousarray(raw)), quantization, (8, 64)).numpy()
    assert np.abs(restored - weights).max() < 0.5


def test_a_single_block_at_an_odd_offset() -> None:
    raw = np.random.default_rng(1).integers(0, 120, 1 + 34, dtype=np.uint8)
    result = dequantize(torch.from_numpy(raw)[1:], "Q8_0", (32,))
    np.testing.assert_array_equal(result.numpy(), gguf_dequantize(raw[1:].copy(), "Q8_0"))


def test_the_result_does_not_share_memory_with_the_input() -> None:
    raw = torch.zeros(16, dtype=torch.uint8)
    values = dequantize(raw, "F32", (4,))
    values += 1
    assert int(raw.sum()) == 0


def test_block_shapes_equal_those_of_ggml() -> None:
    for name, sizes in GGUF_BLOCK_SHAPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


@pytest.mark.parametrize(
    ("count", "quantization", "shape"),
    [(34, "Q8_0", (33,)), (33, "Q8_0", (32,)), (34, "Q8_0", ()), (34, "IQ9", (32,)), (68, "Q8_0", (4, 16))],
)
def test_bytes_that_do_not_match_the_shape_raise(count: int, quantization: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"do not hold|cannot be dequantized"):
        dequantize(torch.zeros(count, dtype=torch.uint8), quantization, shape)
