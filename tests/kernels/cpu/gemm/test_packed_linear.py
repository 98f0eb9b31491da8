"""Packed weights times activations on the CPU, in 8 bits and in bfloat16, against plain torch."""

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
from plait.kernels.cpu.ops import ThreadContext, quantize_blocks
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.reference import ops

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
needs_amx = pytest.mark.skipif(not amx.available(), reason="2026-11-21: products in bfloat16 need AMX")
SCRATCH = amx.allocate_scratch(1, amx_blocking.SCRATCH_BYTES) if amx.available() else None
ADDRESS = 0 if SCRATCH is None else SCRATCH.ctypes.data
bits_of = st.sampled_from([4, 8])
gates_of = st.sampled_from([vector_ops.SILU, vector_ops.GELU])


@numba.njit
def linear(counters, scratch, weight, bits, x, out):
    if scratch:
        amx.load_tile_config(scratch)
    packed_linear.linear(ThreadContext(0, 1, address_of(counters), scratch), 0, weight, bits, x, out)
    if scratch:
        amx.release_tiles()


@numba.njit
def gate_up_linear(counters, scratch, weight, bits, gate, x, out, gates):
    if scratch:
        amx.load_tile_config(scratch)
    packed_linear.gate_up_linear(
        ThreadContext(0, 1, address_of(counters), scratch), 0, weight, bits, gate, x, out, gates
    )
    if scratch:
        amx.release_tiles()


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scales_of(weight: packed_weights.QuantizedWeight) -> torch.Tensor:
    """Each weight's scale, [O, C]."""
    return torch.from_numpy(np.repeat(np.abs(weight.scales.astype(np.float32)), 32, axis=1))


def some_rows(data: st.DataObject, rows: int) -> slice:
    first = data.draw(st.integers(0, rows - 1))
    return slice(first, data.draw(st.integers(first + 1, rows)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 7), bits_of, st.data())
def test_product_is_right_and_a_rows_bits_are_its_own(rows, tiles, blocks, bits, data):
    weight = packed_weights.quantize(drawn(1, 32 * tiles, 32 * blocks), bits)
    packed, x = packed_weights.pack(weight), random_int8(rows, 32 * blocks, rows)
    out = np.zeros((rows, 32 * tiles), np.float32)
    linear(counters(), 0, packed.address, bits, x, out)
    expected = dequantized(x).double().numpy() @ weight.dequantize().astype(np.float64).T
    np.testing.assert_allclose(out, expected, atol=1e-4, rtol=1e-4)
    some = some_rows(data, rows)
    qvalues, scales, block_sums = (np.ascontiguousarray(each[some]) for each in x[:3])
    again = np.zeros((len(qvalues), 32 * tiles), np.float32)
    linear(
        counters(), 0, packed.address, bits, x._replace(qvalues=qvalues, scales=scales, block_sums=block_sums), again
    )
    assert np.array_equal(again, out[some])


def amx_linear(packed, x):
    """[T, O]"""
    rows, wide_rows = len(x.bf16_tiles), len(x.bf16_tiles) + -len(x.bf16_tiles) % 16
    out = torch.full((wide_rows, 32 * len(packed.data)), float("nan")).numpy()
    linear(counters(), ADDRESS, packed.address, packed.bits, x, out[:rows])
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
def test_product_in_bfloat16(rows, outputs, blocks, quantization, size, data):
    plain = drawn(rows, outputs, 32 * blocks) * np.float32(size)
    raw = gguf.quants.quantize(plain, gguf.GGMLQuantizationType[quantization]).view(np.uint8)
    weight = packed_weights.from_gguf(raw, quantization, plain.shape)
    packed, values = packed_weights.pack(weight), torch.from_numpy(drawn(rows + 1, rows, 32 * blocks)).bfloat16()
    out = amx_linear(packed, from_bf16(values))
    exact, magnitudes = torch.from_numpy(weight.dequantize()).double(), values.double().abs()
    expected = values.double() @ exact.T
    # A weight is off by half a unit of bfloat16's last place; the constant it is computed with by a bit of its scale.
    steps = scales_of(weight).double()
    bound = magnitudes @ (2**-8 * exact.abs() + 2**-9 * steps).T + 1e-5 * magnitudes @ exact.abs().T
    assert ((out.double() - expected).abs() <= bound + 1e-30).all()
    some = some_rows(data, rows)
    assert torch.equal(amx_linear(packed, from_bf16(values[some])), out[some])


@needs_amx
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_panel_holds_the_nearest_bfloat16(bits, blocks):
    """One activation of 1 at a time reads each weight as it was multiplied."""
    weight = packed_weights.quantize(drawn(bits, 40, 32 * blocks), bits)
    found = amx_linear(packed_weights.pack(weight), from_bf16(torch.eye(32 * blocks))).T
    assert torch.equal(found, found.bfloat16().float())
    exact = torch.from_numpy(weight.dequantize())
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 2**-9 * scales_of(weight)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), bits_of, gates_of)
def test_gated_product(rows, tiles, bits, gate):
    pair, packed, x = random_gate_up(rows, tiles, bits)
    out = empty_int8(rows, 32 * tiles)
    gate_up_linear(counters(), 0, packed.address, bits, gate, x, out, np.zeros((32, 64), np.float32))
    assert_close_int8(
        out, reference_glu(gate, dequantized(x), [torch.from_numpy(weight.dequantize()) for weight in pair])
    )


WIDE_REGISTERS = re.compile(r"%(zmm|k[0-7]|[xy]mm(1[6-9]|2\d|3[01]))\b")


def test_registers_are_those_of_the_cpu_it_is_compiled_for():
    """Without AVX-512 there are 16, of 32 bytes, and no masks."""
    x, out = random_int8(1, 64, 0), empty_int8(1, 32)
    weight = packed_weights.pack(packed_weights.quantize(drawn(0, 64, 64), 4))
    linear(counters(), 0, weight.address, 4, x, np.zeros((1, 64), np.float32))
    gate_up_linear(counters(), 0, weight.address, 4, vector_ops.SILU, x, out, np.zeros((32, 64), np.float32))
    for function in (linear, gate_up_linear):
        assembly = "".join(function.inspect_asm().values())
        assert "%ymm" in assembly
        assert bool(WIDE_REGISTERS.search(assembly)) == isa.has_features("avx512f")


@needs_amx
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), bits_of, gates_of)
def test_gated_product_in_bfloat16(rows, tiles, bits, gate):
    pair, packed, x = random_gate_up(rows, tiles, bits)
    out, room, values = empty_bf16(rows, 32 * tiles), torch.zeros(32, 64).numpy(), dequantized(x).bfloat16()
    gate_up_linear(counters(), ADDRESS, packed.address, bits, gate, from_bf16(values), out, room)
    weights = [amx_linear(packed_weights.pack(weight), from_bf16(torch.eye(64))).T for weight in pair]
    expected = reference_glu(gate, values.float(), weights)
    torch.testing.assert_close(bf16_values(out).float(), expected, atol=1e-4, rtol=2**-7)


@needs_amx
@pytest.mark.parametrize("gate", [vector_ops.SILU, vector_ops.GELU])
def test_gates_over_all_their_range(gate):
    """g from far below to far above, u one; nothing is written behind the rows."""
    rows = 28
    g = torch.cat([torch.linspace(-300, 300, rows * 16), torch.linspace(-9, 9, rows * 16)]).view(rows, 32)
    pairs = torch.stack([g.view(rows, 2, 16), torch.ones(rows, 2, 16)], -2).swapaxes(0, 1).contiguous()
    out = torch.full((rows + 4, 32), 7.0, dtype=torch.bfloat16)
    gate_rows(pairs.numpy(), gate, out.view(torch.uint16).numpy())
    torchs = ops.silu_and_multiply if gate == vector_ops.SILU else ops.gelu_tanh_and_multiply
    torch.testing.assert_close(
        out[:rows].double(), torchs(torch.cat([g, torch.ones(rows, 32)], -1).double()), rtol=2**-8 + 1e-5, atol=2e-5
    )
    assert (out[rows:] == 7.0).all()


@numba.njit
def gate_rows(pairs, gate, out):
    for half in range(2):
        for row in range(0, pairs.shape[1], 4):
            at, to = address_of(pairs[half, row]), address_of(out[row, 16 * half :])
            if gate == vector_ops.SILU:
                vector_ops.glu_x4_to_bf16(0, at, to)
            else:
                vector_ops.glu_x4_to_bf16(1, at, to)


def random_gate_up(rows, tiles, bits):
    """Two weights, both as one, and activations."""
    pair = [packed_weights.quantize(drawn(2 * rows + i, 32 * tiles, 64) / 4, bits) for i in range(2)]
    return pair, packed_weights.pack(packed_weights.interleave_tiles(*pair)), random_int8(rows, 64, 3)


def reference_glu(gate, x, weights):
    torchs = ops.silu_and_multiply if gate == vector_ops.SILU else ops.gelu_tanh_and_multiply
    return torchs(torch.cat([x @ weight.T for weight in weights], -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bad):
    weight, x = packed_weights.pack(packed_weights.quantize(np.ones((32, 32), np.float32), 8)), torch.ones(1, 32)
    x[0, 5] = bad
    rounded, out = empty_int8(1, 32), np.zeros((1, 32), np.float32)
    quantize_into(x.numpy(), rounded)
    linear(counters(), 0, weight.address, 8, rounded, out)
    assert not np.isfinite(out).any()
    if ADDRESS:
        quantize_into(x.numpy(), rounded := empty_bf16(1, 32))
        assert not amx_linear(weight, rounded).isfinite().any()


@numba.njit
def quantize_into(x, out):
    quantize_blocks(address_of(x), out, 0, x.size // 32)
