"""The int8 kernel in every layout and instruction set that this CPU can run: integer sums are exact, bits are the same.

Where there is no AVX-VNNI, VPDPBUSD on 8 lanes is tested in its AVX-512 encoding; the code around it is the same.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import llvmlite.binding
import numpy as np
import pytest
from example_share import sample_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import product
from quantized_activations import activations_of, dequantized, random_int8
from stored_weights import dequantized_weight, random_weight

from plait.kernels.cpu.compiler import object_code
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import int8_blocks, int8_kernel, layout_kernels, packed_weights
from plait.kernels.cpu.gemm.layouts import LAYOUTS

HOST = llvmlite.binding.get_host_cpu_features()
HAS_VNNI = HOST.get("avx512vnni") and HOST.get("avx512vl") and HOST.get("avx512bw")
ISAS = [int8_blocks.AVX512_VNNI, int8_blocks.AVX_VNNI, int8_blocks.AVX2] if HAS_VNNI else [int8_blocks.INT8_ISA]
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
layouts = pytest.mark.parametrize("name", LAYOUTS)
rows_of = st.sampled_from([1, 2, 3, 4, 7])
VNNI_LAYOUTS = (
    "Q4_1",
    "Q5_0",
    "Q6_K",
    "Q2_K",
    "IQ4_XS",
)  # tested with AVX-VNNI, which shares all code with one of the others
ALL_CASES = [(name, isa) for name in LAYOUTS for isa in ISAS if isa is not int8_blocks.AVX_VNNI or name in VNNI_LAYOUTS]
CASES = [case for case in ALL_CASES if case[1] is int8_blocks.INT8_ISA]  # its kernels are compiled already
CASES += sample_of([case for case in ALL_CASES if case not in CASES], least=8)


@cache
def compiled(isa, name):
    """A layout's functions: those of this CPU, or only the product, compiled for another instruction set.

    Both are kept in the kernels' cache; of the latter, how they are made here, too.
    """
    if isa is int8_blocks.INT8_ISA:
        return layout_kernels.layout_kernel(name)
    path = object_code.cache_path(f"test-{isa.name}-{name}", Path(__file__).read_text())
    with pytest.MonkeyPatch.context() as patched:
        for module in (int8_blocks, int8_kernel):
            patched.setattr(module, "INT8_ISA", isa)
        patched.setattr(int8_kernel, "MAX_ROWS", 6 if isa is int8_blocks.AVX512_VNNI else 4)
        patched.setattr(layout_kernels, "_cache_path", lambda name: path)
        for other in ("generate_dequantize", "generate_pass", "generate_output"):
            patched.setattr(layout_kernels, other, lambda *arguments: None)
        return layout_kernels._load.__wrapped__(name)


def whole_number_weight(name, units, extreme_share, seed):
    """A weight [32, C] whose float16 scales are 1 and whose minima are 0, often of extreme quants and small scales."""
    weight = random_weight(name, 32, units * LAYOUTS[name].unit_inputs, seed)
    if LAYOUTS[name].is_float:
        whole = np.random.default_rng(seed).integers(-120, 121, (32, weight.inputs)).astype(np.float32)
        rows = gguf.quants.quantize(whole, gguf.GGMLQuantizationType[name]).view(np.uint8)
        return packed_weights.StoredWeight(rows, LAYOUTS[name])
    rng, rows = np.random.default_rng(seed), weight.rows.reshape(-1, weight.block_bytes)
    rows[rng.random(len(rows)) < extreme_share] = rng.choice(np.array([0, 255], np.uint8))
    if name == "MXFP4":
        rows[:, 0] = 128  # the scale of the doubled numbers is 2^(128 - 128)
        return weight
    scale, *minimum = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(
        name, (0, 2) if LAYOUTS[name].has_minima else (0,)
    )
    rows[:, scale : scale + 2] = np.array([1.0], np.float16).view(np.uint8)
    for offset in minimum:
        rows[:, offset : offset + 2] = 0
    return weight


@pytest.mark.parametrize(("name", "isa"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
@settings(max_examples=10, deadline=None)
@given(rows_of, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1000))
def test_products_of_whole_numbers_are_exact(name, isa, rows, weight_share, activation_share, seed):
    """With float scales of 1 all sums of two units are whole numbers below 2^24 in most layouts, so exact in float32.

    With 8-bit scales as well the largest exceed that, and each of the at most 16 additions rounds by half a unit.
    """
    weight = whole_number_weight(name, 2, weight_share, seed)
    rng = np.random.default_rng(seed)
    quants = rng.integers(-128, 128, (rows, weight.inputs))
    extreme = rng.random(quants.shape) < activation_share
    quants[extreme] = rng.choice([-128, 127], int(extreme.sum()))
    exact = quants @ dequantized_weight(weight).astype(np.int64).T
    sums = np.abs(quants) @ np.abs(dequantized_weight(weight)).astype(np.int64).T
    offsets = LAYOUTS[name].offset * 127 * 128 * weight.inputs  # of the integers before the offset is subtracted
    result = product(packed_weights.pack(weight), activations_of(quants), compiled(isa, name))
    if int(sums.max()) + offsets < 2**24:
        assert np.array_equal(result, exact)
    assert (np.abs(result - exact) <= 32 * 2**-24 * (sums + offsets)).all()


@layouts
@settings(max_examples=10, deadline=None)
@given(rows_of, st.integers(1, 5), st.integers(0, 1000))
def test_all_instruction_sets_have_the_same_bits(name, rows, units, seed):
    weight = random_weight(name, 64, units * LAYOUTS[name].unit_inputs, seed)
    packed, x = packed_weights.pack(weight), random_int8(rows, weight.inputs, seed)
    first, *others = (product(packed, x, compiled(isa, other)) for other, isa in CASES if other == name)
    values, weights = dequantized(x).double().numpy(), dequantized_weight(weight).astype(np.float64)
    magnitudes = np.abs(values) @ np.abs(weights).T
    # Integers with an offset cancel: the float32 sums are of the size of the offset times the scale.
    assert (np.abs(first - values @ weights.T) <= 2e-6 * magnitudes + 1e-6 * magnitudes.max()).all()
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(("name", "isa"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
@settings(max_examples=3, deadline=None)
@given(st.integers(1, 70), st.sampled_from([2, 9, 11]), st.integers(0, 1000))
def test_a_row_has_the_same_bits_among_any_number_of_rows(name, isa, rows, units, seed):
    """Rows are multiplied some at a time and by chunks of inputs, depending on their number."""
    weight = packed_weights.pack(random_weight(name, 64, units * LAYOUTS[name].unit_inputs, seed))
    x = random_int8(70, weight.inputs, seed)
    few = product(weight, type(x)(*(array[:rows] for array in x)), compiled(isa, name))
    last = product(weight, type(x)(*(array[rows - 1 : rows] for array in x)), compiled(isa, name))
    assert np.array_equal(product(weight, x, compiled(isa, name))[:rows], few)
    assert np.array_equal(few[-1:], last)


def test_best_int8_isa_is_the_widest_available(monkeypatch):
    avx512, base = {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}, {"avx2", "fma", "f16c"}
    for features, expected in (
        (avx512 | base, int8_blocks.AVX512_VNNI),
        (avx512 - {"avx512vnni"} | base, int8_blocks.AVX2),
        (base | {"avxvnni"}, int8_blocks.AVX_VNNI),
        (base, int8_blocks.AVX2),
    ):
        monkeypatch.setattr(int8_blocks.isa, "COMPILED_FOR", frozenset(features))
        assert int8_blocks.best_int8_isa() is expected
