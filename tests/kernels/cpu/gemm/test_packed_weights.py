"""Packing weights: GGUF's numbers stay exact in every layout, and float weights are rounded within half a step."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import unpacked
from stored_weights import dequantized_weight, random_blocks, random_weight

from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import gguf_blocks, packed_weights
from plait.kernels.cpu.gemm.layouts import LAYOUTS, TILE_OUTPUTS

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
sizes = st.tuples(st.integers(1, 70), st.integers(1, 3))  # outputs, units of inputs
layouts = pytest.mark.parametrize("name", LAYOUTS)


@layouts
@settings(max_examples=10, deadline=None)
@given(sizes, st.sampled_from([1e-4, 0.01, 100.0]), st.integers(0, 1000))
def test_gguf_weights_are_packed_exactly(name, size, magnitude, seed):
    outputs, units = size
    weight = random_weight(name, outputs, units * LAYOUTS[name].unit_inputs, seed, magnitude)
    packed = packed_weights.pack(packed_weights.from_gguf(weight.rows, name, (outputs, weight.inputs)))
    assert (packed.outputs, packed.inputs) == (outputs, weight.inputs)
    assert np.array_equal(unpacked(packed), dequantized_weight(weight))


@layouts
def test_a_form_takes_about_as_many_bytes_as_the_file(name):
    """6-bit scales are unpacked to bytes: at most a third of a bit for each weight."""
    layout = LAYOUTS[name]
    stored = packed_weights.block_bytes(layout)
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = layout.unit_inputs if layout.is_float else 1  # the gguf package takes floats one by one
    assert (layout.unit_inputs, stored) == (blocks * numbers, blocks * size)
    assert 0 <= 8 * (layout.output_bytes - stored) / layout.unit_inputs < 0.3
    assert (name in gguf_blocks.UNPACK or layout.is_float) and layout.unit_bytes % 2 == 0


@layouts
@settings(max_examples=10, deadline=None)
@given(sizes, st.integers(0, 1000), st.data())
def test_select_outputs(name, size, seed, data):
    outputs, units = size
    packed = packed_weights.pack(random_weight(name, outputs, units * LAYOUTS[name].unit_inputs, seed))
    ids = np.array(data.draw(st.lists(st.integers(0, outputs - 1), min_size=1, max_size=80)))
    assert np.array_equal(unpacked(packed_weights.select_outputs(packed, ids)), unpacked(packed)[ids])


@settings(max_examples=20, deadline=None)
@given(sizes, st.sampled_from([4, 8]), st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_quantize_rounds_within_half_a_step(size, bits, magnitude, seed):
    outputs, blocks = size
    weight = (np.random.default_rng(seed).normal(size=(outputs, blocks, 32)) * magnitude).astype(np.float32)
    weight[0, 0] = 0.0
    rounded = unpacked(packed_weights.pack(packed_weights.quantize(weight.reshape(outputs, -1), bits)))
    steps = (weight.max(-1) - weight.min(-1)) / 15 if bits == 4 else np.abs(weight).max(-1) / 127
    # float16 holds the scale and the minimum to 11 bits
    slack = 2**-10 * (2**bits * steps + np.abs(weight).max(-1)) + 1e-6 * magnitude
    assert (np.abs(rounded.reshape(weight.shape) - weight) <= (0.51 * steps + slack)[..., None]).all()
    assert not rounded[0, :32].any()


def test_weights_of_several_forms_are_packed_side_by_side():
    """Neighbours of one layout become one weight; others follow as weights of their own."""
    parts = [random_weight(name, 64, 256, i) for i, name in enumerate(("Q4_K", "Q4_K", "Q6_K"))]
    merged = packed_weights.pack_concatenated(parts)
    assert [(weight.layout.name, weight.outputs) for weight in merged] == [("Q4_K", 128), ("Q6_K", 64)]
    assert np.array_equal(
        np.concatenate([unpacked(weight) for weight in merged]),
        np.concatenate([dequantized_weight(part) for part in parts]),
    )


def test_tiles_of_a_pair_alternate():
    parts = [random_weight(name, 96, 256, i) for i, name in enumerate(("Q5_K", "Q8_0"))]
    pair = packed_weights.pack_pair(*parts)
    for part, weight, place in zip(parts, (pair.first, pair.second), (0, pair.first.tile_bytes), strict=True):
        assert np.shares_memory(weight.data, pair.data) and weight.address == pair.data.ctypes.data + place
        tiles = [
            packed_weights.PackedWeight(np.ascontiguousarray(tile)[None], weight.layout, 32) for tile in weight.data
        ]
        assert np.array_equal(np.concatenate([unpacked(tile) for tile in tiles]), dequantized_weight(part))
    assert pair.stride == pair.first.tile_bytes + pair.second.tile_bytes


def test_many_tiles_are_packed_by_threads(monkeypatch):
    weight = random_weight("Q4_K", 8 * TILE_OUTPUTS + 5, 256, 0)
    monkeypatch.setattr(packed_weights, "CHUNK_WEIGHTS", 1)
    assert np.array_equal(unpacked(packed_weights.pack(weight)), dequantized_weight(weight))


def test_weights_that_do_not_fit_are_refused():
    assert packed_weights.from_gguf(np.zeros((2, 66), np.uint8), "IQ2_XXS", (2, 256)) is None
    assert packed_weights.from_gguf(random_blocks("Q8_0", 2, 32, 0), "Q8_0", (2, 1, 32)) is None
    with pytest.raises(ValueError, match="multiple of 32"):
        packed_weights.quantize(np.zeros((2, 40), np.float32), 8)
