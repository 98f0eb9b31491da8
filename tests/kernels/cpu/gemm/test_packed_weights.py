"""Packing weights: GGUF's qvalues stay exact, and float weights are rounded within half a quantization step."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.packed_layout import dequantize_row
from plait.kernels.gguf_dequantize import GGUF_BLOCK_SHAPES, dequantize

sizes = st.tuples(st.integers(1, 70), st.integers(1, 4))  # outputs, blocks of 32 inputs


def stored(quantization: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    weights = np.random.default_rng(seed).normal(size=(rows, 32 * blocks)).astype(np.float32)
    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[quantization]).view(np.uint8)


def unpacked(weight: packed_weights.PackedWeight) -> np.ndarray:
    """The weight [O, C] as the kernel that reads embeddings dequantizes it."""
    out = np.zeros((weight.outputs, weight.inputs), np.float32)
    data = weight.data.view(np.int8).reshape(-1)
    for row in range(weight.outputs):
        dequantize_row(data, weight.bits, row, out[row])
    return out


@pytest.mark.parametrize("quantization", packed_weights.LOSSLESS_GGUF_FORMATS)
@settings(max_examples=20, deadline=None)
@given(sizes, st.integers(0, 1000))
def test_gguf_weights_are_packed_exactly(quantization, size, seed):
    rows, blocks = size
    shape = (rows, 32 * blocks)
    raw = stored(quantization, rows, blocks, seed)
    weight = packed_weights.from_gguf(raw, quantization, shape)
    expected = dequantize(torch.from_numpy(raw), quantization, shape).numpy()
    assert np.array_equal(weight.dequantize(), expected)
    packed = packed_weights.pack(weight)
    assert np.array_equal(unpacked(packed), expected)
    assert packed.bits == (4 if quantization.startswith("Q4") else 8)


@settings(max_examples=20, deadline=None)
@given(sizes, st.sampled_from([4, 8]), st.integers(0, 1000), st.data())
def test_select_outputs(size, bits, seed, data):
    rows, blocks = size
    weight = np.random.default_rng(seed).normal(size=(rows, 32 * blocks)).astype(np.float32)
    packed = packed_weights.pack(packed_weights.quantize(weight, bits))
    ids = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=80)))
    assert np.array_equal(unpacked(packed_weights.select_outputs(packed, ids)), unpacked(packed)[ids])


@settings(max_examples=20, deadline=None)
@given(sizes, st.sampled_from([4, 8]), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_quantize_rounds_within_half_a_step(size, bits, magnitude, seed):
    rows, blocks = size
    weight = (np.random.default_rng(seed).normal(size=(rows, blocks, 32)) * magnitude).astype(np.float32)
    weight[0, 0] = 0.0
    dequantized = packed_weights.quantize(weight.reshape(rows, -1), bits).dequantize().reshape(weight.shape)
    steps = (weight.max(-1) - weight.min(-1)) / 15 if bits == 4 else np.abs(weight).max(-1) / 127
    # float16 holds the scale and the minimum to 11 bits
    slack = 2**-10 * (2**bits * steps + np.abs(weight).max(-1)) + 1e-6 * magnitude
    assert (np.abs(dequantized - weight) <= (0.51 * steps + slack)[..., None]).all()
    assert not dequantized[0, 0].any()


def test_interleave_tiles_alternates_32_outputs():
    first = np.repeat(np.arange(64, dtype=np.float32)[:, None], 32, axis=1)
    second = 100 + first
    mixed = packed_weights.interleave_tiles(
        packed_weights.quantize(first, 8), packed_weights.quantize(second, 8)
    ).dequantize()[:, 0]
    order = [*range(32), *range(100, 132), *range(32, 64), *range(132, 164)]
    np.testing.assert_allclose(mixed, np.array(order), atol=1.0, rtol=0.01)


def test_weights_that_do_not_fit_are_refused():
    raw = stored("Q8_0", 2, 1, 0)
    assert packed_weights.from_gguf(np.zeros((2, GGUF_BLOCK_SHAPES["Q6_K"][1]), np.uint8), "Q6_K", (2, 256)) is None
    raw[:, :2] = np.array([255, 123], np.uint8)  # a scale of 65504: 128 times it exceeds float16
    assert packed_weights.from_gguf(raw, "Q8_0", (2, 32)) is None
    with pytest.raises(ValueError, match="multiple of 32"):
        packed_weights.quantize(np.zeros((2, 40), np.float32), 8)
