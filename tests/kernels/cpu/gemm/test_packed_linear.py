"""Products of packed weights and activations on the CPU, in int8 and in bfloat16, against torch."""

from __future__ import annotations

import re

import gguf
import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_activations import (
    assert_close_int8,
    bf16_values,
    counters,
    dequantized,
    empty_bf16,
    empty_int8,
    from_bf16,
    random_int8,
)

from plait.kernels.cpu import amx, isa, vector_ops
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.gemm import amx_blocking, packed_linear, packed_weights
from plait.kernels.cpu.ops import quantize_blocks
from plait.kernels.cpu.threads import ThreadContext
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.reference import ops

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
needs_amx = pytest.mark.skipif(not amx.available(), reason="2026-11-21: products in bfloat16 need AMX")
SCRATCH = amx.allocate_scratch(1, amx_blocking.SCRATCH_BYTES) if amx.available() else None
SCRATCH_ADDRESS = 0 if SCRATCH is None else SCRATCH.ctypes.data
bits_of = st.sampled_from([4, 8])
activations_of = st.sampled_from([vector_ops.SILU, vector_ops.GELU])


@numba.njit
def linear(counters, scratch, weight, bits, x, out):
    if scratch:
        amx.load_tile_config(scratch)
    packed_linear.linear(ThreadContext(0, 1, address_of(counters), scratch), 0, weight, bits, x, out)
    if scratch:
        amx.release_tiles()


@numba.njit
def gate_up_linear(counters, scratch, weight, bits, activation, x, out, buffer):
    if scratch:
        amx.load_tile_config(scratch)
    packed_linear.gate_up_linear(
        ThreadContext(0, 1, address_of(counters), scratch), 0, weight, bits, activation, x, out, buffer
    )
    if scratch:
        amx.release_tiles()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scales_of(weight: packed_weights.QuantizedWeight) -> torch.Tensor:
    """The scale of each weight, [O, C]."""
    return torch.from_numpy(np.repeat(np.abs(weight.scales.astype(np.float32)), 32, axis=1))


def draw_row_range(data: st.DataObject, rows: int) -> slice:
    first = data.draw(st.integers(0, rows - 1))
    return slice(first, data.draw(st.integers(first + 1, rows)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 7), bits_of, st.data())
def test_int8_product_with_bits_independent_of_batch(rows, tiles, blocks, bits, data):
    weight = packed_weights.quantize(normal(1, 32 * tiles, 32 * blocks), bits)
    packed, x = packed_weights.pack(weight), random_int8(rows, 32 * blocks, rows)
    out = np.zeros((rows, 32 * tiles), np.float32)
    linear(counters(), 0, packed.address, bits, x, out)
    expected = dequantized(x).double().numpy() @ weight.dequantize().astype(np.float64).T
    np.testing.assert_allclose(out, expected, atol=1e-4, rtol=1e-4)
    subset = draw_row_range(data, rows)
    qvalues, scales, block_sums = (np.ascontiguousarray(field[subset]) for field in x[:3])
    again = np.zeros((len(qvalues), 32 * tiles), np.float32)
    linear(
        counters(), 0, packed.address, bits, x._replace(qvalues=qvalues, scales=scales, block_sums=block_sums), again
    )
    assert np.array_equal(again, out[subset])


def amx_linear(packed, x):
    """The product [T, O] in bfloat16."""
    rows, padded_rows = len(x.bf16_tiles), len(x.bf16_tiles) + -len(x.bf16_tiles) % 16
    out = torch.full((padded_rows, 32 * len(packed.data)), float("nan")).numpy()
    linear(counters(), SCRATCH_ADDRESS, packed.address, packed.bits, x, out[:rows])
    return torch.from_numpy(out[:rows, : packed.outputs])


@needs_amx
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 100),
    st.sampled_from([1, 2, 3, 7, 18, 19, 48]),
    st.sampled_from(sorted(packed_weights.LOSSLESS_GGUF_FORMATS)),
    st.floats(1e-2, 1e2),
    st.data(),
)
def test_bfloat16_product_with_bits_independent_of_batch(rows, outputs, blocks, quantization, magnitude, data):
    floats = normal(rows, outputs, 32 * blocks) * np.float32(magnitude)
    raw = gguf.quants.quantize(floats, gguf.GGMLQuantizationType[quantization]).view(np.uint8)
    weight = packed_weights.from_gguf(raw, quantization, floats.shape)
    packed, values = packed_weights.pack(weight), torch.from_numpy(normal(rows + 1, rows, 32 * blocks)).bfloat16()
    out = amx_linear(packed, from_bf16(values))
    exact, magnitudes = torch.from_numpy(weight.dequantize()).double(), values.double().abs()
    expected = values.double() @ exact.T
    # A weight is off by half a unit in the last place of bfloat16, its offset by a bit of its scale.
    steps = scales_of(weight).double()
    bound = magnitudes @ (2**-8 * exact.abs() + 2**-9 * steps).T + 1e-5 * magnitudes @ exact.abs().T
    assert ((out.double() - expected).abs() <= bound + 1e-30).all()
    subset = draw_row_range(data, rows)
    assert torch.equal(amx_linear(packed, from_bf16(values[subset])), out[subset])


@needs_amx
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_weights_are_dequantized_to_the_nearest_bfloat16(bits, blocks):
    """The product with the unit matrix yields each weight as it was multiplied."""
    weight = packed_weights.quantize(normal(bits, 40, 32 * blocks), bits)
    weights = amx_linear(packed_weights.pack(weight), from_bf16(torch.eye(32 * blocks))).T
    assert torch.equal(weights, weights.bfloat16().float())
    exact = torch.from_numpy(weight.dequantize())
    assert ((weights - exact).abs() <= 2**-8 * exact.abs() + 2**-9 * scales_of(weight)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), bits_of, activations_of)
def test_int8_gated_product(rows, tiles, bits, activation):
    pair, packed, x = random_gate_up(rows, tiles, bits)
    out = empty_int8(rows, 32 * tiles)
    gate_up_linear(counters(), 0, packed.address, bits, activation, x, out, np.zeros((32, 64), np.float32))
    assert_close_int8(
        out, reference_glu(activation, dequantized(x), [torch.from_numpy(weight.dequantize()) for weight in pair])
    )


WIDE_REGISTERS = re.compile(r"%(zmm|k[0-7]|[xy]mm(1[6-9]|2\d|3[01]))\b")


def test_machine_code_uses_registers_of_the_target_cpu():
    """Without AVX-512 there are 16 registers of 32 bytes, and no mask registers."""
    x, out = random_int8(1, 64, 0), empty_int8(1, 32)
    weight = packed_weights.pack(packed_weights.quantize(normal(0, 64, 64), 4))
    linear(counters(), 0, weight.address, 4, x, np.zeros((1, 64), np.float32))
    gate_up_linear(counters(), 0, weight.address, 4, vector_ops.SILU, x, out, np.zeros((32, 64), np.float32))
    for function in (linear, gate_up_linear):
        assembly = "".join(function.inspect_asm().values())
        assert "%ymm" in assembly
        assert bool(WIDE_REGISTERS.search(assembly)) == isa.has_features("avx512f")


@needs_amx
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), bits_of, activations_of)
def test_bfloat16_gated_product(rows, tiles, bits, activation):
    pair, packed, x = random_gate_up(rows, tiles, bits)
    out, buffer, values = empty_bf16(rows, 32 * tiles), torch.zeros(32, 64).numpy(), dequantized(x).bfloat16()
    gate_up_linear(counters(), SCRATCH_ADDRESS, packed.address, bits, activation, from_bf16(values), out, buffer)
    weights = [amx_linear(packed_weights.pack(weight), from_bf16(torch.eye(64))).T for weight in pair]
    expected = reference_glu(activation, values.float(), weights)
    torch.testing.assert_close(bf16_values(out).float(), expected, atol=1e-4, rtol=2**-7)


@needs_amx
@pytest.mark.parametrize("activation", [vector_ops.SILU, vector_ops.GELU])
def test_activations_over_their_full_range(activation):
    """`up` is one; nothing is written after the rows."""
    rows = 28
    g = torch.cat([torch.linspace(-300, 300, rows * 16), torch.linspace(-9, 9, rows * 16)]).view(rows, 32)
    pairs = torch.stack([g.view(rows, 2, 16), torch.ones(rows, 2, 16)], -2).swapaxes(0, 1).contiguous()
    out = torch.full((rows + 4, 32), 7.0, dtype=torch.bfloat16)
    glu_rows(pairs.numpy(), activation, out.view(torch.uint16).numpy())
    multiply = ops.silu_and_multiply if activation == vector_ops.SILU else ops.gelu_tanh_and_multiply
    torch.testing.assert_close(
        out[:rows].double(), multiply(torch.cat([g, torch.ones(rows, 32)], -1).double()), rtol=2**-8 + 1e-5, atol=2e-5
    )
    assert (out[rows:] == 7.0).all()


@numba.njit
def glu_rows(pairs, activation, out):
    for half in range(2):
        for row in range(0, pairs.shape[1], 4):
            pair, target = address_of(pairs[half, row]), address_of(out[row, 16 * half :])
            if activation == vector_ops.SILU:
                vector_ops.glu_x4_to_bf16(0, pair, target)
            else:
                vector_ops.glu_x4_to_bf16(1, pair, target)


def random_gate_up(rows, tiles, bits):
    """(the weights of gate and up, both packed as one, activations)."""
    pair = [packed_weights.quantize(normal(2 * rows + i, 32 * tiles, 64) / 4, bits) for i in range(2)]
    return pair, packed_weights.pack(packed_weights.interleave_tiles(*pair)), random_int8(rows, 64, 3)


def reference_glu(activation, x, weights):
    multiply = ops.silu_and_multiply if activation == vector_ops.SILU else ops.gelu_tanh_and_multiply
    return multiply(torch.cat([x @ weight.T for weight in weights], -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_inputs_give_non_finite_results(bad):
    weight, x = packed_weights.pack(packed_weights.quantize(np.ones((32, 32), np.float32), 8)), torch.ones(1, 32)
    x[0, 5] = bad
    quantized, out = empty_int8(1, 32), np.zeros((1, 32), np.float32)
    quantize_into(x.numpy(), quantized)
    linear(counters(), 0, weight.address, 8, quantized, out)
    assert not np.isfinite(out).any()
    if SCRATCH_ADDRESS:
        quantize_into(x.numpy(), quantized := empty_bf16(1, 32))
        assert not amx_linear(weight, quantized).isfinite().any()


@numba.njit
def quantize_into(x, out):
    quantize_blocks(address_of(x), out, 0, x.size // 32)
