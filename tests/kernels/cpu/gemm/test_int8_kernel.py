"""The int8 kernel in every form that this CPU can run: integer sums are exact, and all forms have the same bits.

Where there is no AVX-VNNI, VPDPBUSD on 8 lanes is tested in its AVX-512 encoding; the code around it is the same.
"""

from __future__ import annotations

from functools import cache

import llvmlite.binding
import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quantized_activations import dequantized, random_int8

from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import int8_kernel, packed_weights

HOST = llvmlite.binding.get_host_cpu_features()
HAS_VNNI = HOST.get("avx512vnni") and HOST.get("avx512vl") and HOST.get("avx512bw")
ISAS = [int8_kernel.AVX512_VNNI, int8_kernel.AVX_VNNI, int8_kernel.AVX2] if HAS_VNNI else [int8_kernel.INT8_ISA]
pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
isas = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
rows_of, bits_of = st.sampled_from([1, 2, 4]), st.sampled_from([4, 8])


@cache
def compiled(isa, bits, rows):
    """Compiles the kernel for an instruction set; intrinsics read it when a function that calls them is compiled."""

    @numba.njit
    def run(weight, x, strides, scales, sums, blocks, out):
        int8_kernel.tile(bits, rows, weight, x, strides, scales, sums, blocks, out)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(int8_kernel, "INT8_ISA", isa)
        run.compile((*[numba.int64] * 2, numba.types.UniTuple(numba.int64, 3), *[numba.int64] * 4))
    return run


def product(isa, weight, qvalues, scales, sums):
    """The result [rows, 32] of one tile."""
    packed, (rows, blocks) = packed_weights.pack(weight), scales.shape
    out = np.full((rows, 32), np.nan, np.float32)
    strides = (qvalues.strides[0], scales.strides[0], out.strides[0])
    addresses = (array.ctypes.data for array in (scales, sums))
    compiled(isa, weight.bits, rows)(packed.address, qvalues.ctypes.data, strides, *addresses, blocks, out.ctypes.data)
    return out


@st.composite
def quantized_operands(draw):
    """(bits, weights [32, 2, 32], activations [rows, 64]), often the extreme values, whose sums are largest."""
    bits, rows, extreme_share = draw(bits_of), draw(rows_of), draw(st.floats(0, 1))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))

    def drawn(shape, low, high, dtype):
        uniform, extreme = rng.integers(low, high + 1, shape), rng.choice([low, high], shape)
        return np.where(rng.random(shape) < extreme_share, extreme, uniform).astype(dtype)

    return bits, drawn((32, 2, 32), 0, 2**bits - 1, np.uint8), drawn((rows, 64), -128, 127, np.int8)


def constant_operands(bits, weight, activation):
    return bits, np.full((32, 2, 32), weight, np.uint8), np.full((1, 64), activation, np.int8)


@isas
@settings(max_examples=60, deadline=None)
@given(quantized_operands())
@example(constant_operands(4, 15, -128))
@example(constant_operands(4, 15, 127))
@example(constant_operands(8, 255, -128))
@example(constant_operands(8, 255, -127))
@example(constant_operands(8, 255, 127))
@example(constant_operands(8, 128, -128))
def test_sums_of_a_block_are_exact(isa, operands):
    """With scales of 1 and two blocks all sums are below 2^24, hence exact in float32."""
    bits, weights, activations = operands
    ones, rows = np.ones((32, 2), np.float16), len(activations)
    weight = packed_weights.QuantizedWeight(weights, ones, 0 * ones, bits)
    result = product(isa, weight, activations, np.ones((rows, 2), np.float32), np.zeros((rows, 2), np.float32))
    assert np.array_equal(result, activations.astype(np.int64) @ weights.reshape(32, 64).astype(np.int64).T)


@settings(max_examples=40, deadline=None)
@given(rows_of, st.integers(1, 9), bits_of, st.integers(0, 1000))
def test_all_instruction_sets_have_the_same_bits(rows, blocks, bits, seed):
    floats = np.random.default_rng(seed).normal(size=(32, 32 * blocks)).astype(np.float32)
    weight, x = packed_weights.quantize(floats, bits), random_int8(rows, 32 * blocks, seed)
    first, *others = (product(isa, weight, x.qvalues, x.scales, x.block_sums) for isa in ISAS)
    expected = dequantized(x).double().numpy() @ weight.dequantize().astype(np.float64).T
    np.testing.assert_allclose(first, expected, atol=1e-4, rtol=1e-4)
    assert all(np.array_equal(first, other) for other in others)


def test_best_int8_isa_is_the_widest_available(monkeypatch):
    avx512, base = {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}, {"avx2", "fma", "f16c"}
    for features, expected in (
        (avx512 | base, int8_kernel.AVX512_VNNI),
        (avx512 - {"avx512vnni"} | base, int8_kernel.AVX2),
        (base | {"avxvnni"}, int8_kernel.AVX_VNNI),
        (base, int8_kernel.AVX2),
    ):
        monkeypatch.setattr(int8_kernel.isa, "COMPILED_FOR", frozenset(features))
        assert int8_kernel.best_int8_isa() is expected
