"""Products of packed weights and activations on the CPU, in int8 and in bfloat16, against torch."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import compiled_kernel
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
from stored_weights import dequantized_weight, random_weight

from plait.kernels.cpu import amx, isa, vector_ops
from plait.kernels.cpu.decoder import missing_features
from plait.kernels.cpu.decoder_weights import weight_part
from plait.kernels.cpu.gemm import amx_blocking, layout_kernels, packed_linear, packed_weights
from plait.kernels.cpu.gemm.layouts import LAYOUTS
from plait.kernels.cpu.kernel_types import RowUpdates
from plait.kernels.cpu.ops import quantize_blocks
from plait.kernels.cpu.parallel.threads import ThreadContext
from plait.kernels.cpu.vector_ops import address_of
from plait.kernels.reference import ops

pytestmark = pytest.mark.skipif(bool(missing_features()), reason="2026-11-22: the kernels need AVX2")
needs_amx = pytest.mark.skipif(not amx.available(), reason="2026-11-21: products in bfloat16 need AMX")
SCRATCH = amx.allocate_scratch(1, amx_blocking.SCRATCH_BYTES) if amx.available() else None
SCRATCH_ADDRESS = 0 if SCRATCH is None else SCRATCH.ctypes.data
NO_UPDATES = RowUpdates(np.empty(0, np.int32), np.empty((0, 7), np.int64), 0, 4, np.empty((0, 1), np.float32))
names_of = st.sampled_from(sorted(LAYOUTS))
activations_of = st.sampled_from([vector_ops.SILU, vector_ops.GELU])


@compiled_kernel
def linear(counters, scratch, parts, x, out, updates):
    if scratch:
        amx.load_tile_config(scratch)
    packed_linear.linear(ThreadContext(0, 1, address_of(counters), scratch), 0, parts, x, out, updates)
    if scratch:
        amx.release_tiles()


@compiled_kernel
def gate_up_linear(counters, scratch, parts, activation, x, out, buffer, updates):
    if scratch:
        amx.load_tile_config(scratch)
    packed_linear.gate_up_linear(
        ThreadContext(0, 1, address_of(counters), scratch), 0, parts, activation, x, out, buffer, updates
    )
    if scratch:
        amx.release_tiles()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def columns(*weights) -> np.ndarray:
    """The columns of a weight of these parts."""
    return np.array([number for weight in weights for number in weight_part(weight)], np.int64)


def pair_columns(pair) -> np.ndarray:
    """The columns of gate and up."""
    return np.array([number for weight in (pair.first, pair.second) for number in weight_part(weight, pair.stride)])


def steps_of(weight: packed_weights.StoredWeight) -> torch.Tensor:
    """How much one step of the integer changes each weight, at most, [O, C]: the largest of 16 or 32 inputs."""
    exact = dequantized_weight(weight).reshape(len(weight.rows), -1, 16)
    return torch.from_numpy(np.repeat(np.abs(exact).max(-1), 16, axis=1))


def draw_row_range(data: st.DataObject, rows: int) -> slice:
    first = data.draw(st.integers(0, rows - 1))
    return slice(first, data.draw(st.integers(first + 1, rows)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.lists(st.tuples(names_of, st.integers(1, 3)), min_size=1, max_size=3), st.data())
def test_int8_product_with_bits_independent_of_batch(rows, sizes, data):
    """A weight of parts in different layouts."""
    stored = [random_weight(name, 32 * tiles, 256, i) for i, (name, tiles) in enumerate(sizes)]
    weights = np.concatenate([dequantized_weight(weight) for weight in stored]).astype(np.float64)
    packed = [packed_weights.pack(weight) for weight in stored]
    parts, x = columns(*packed), random_int8(rows, 256, rows)
    out = np.zeros((rows, len(weights)), np.float32)
    linear(counters(), 0, parts, x, out, NO_UPDATES)
    values = dequantized(x).double().numpy()
    magnitudes = np.abs(values) @ np.abs(weights).T
    assert (np.abs(out - values @ weights.T) <= 2e-6 * magnitudes + 1e-6 * magnitudes.max()).all()
    subset = draw_row_range(data, rows)
    again = np.zeros((len(x.scales[subset]), len(weights)), np.float32)
    linear(counters(), 0, parts, type(x)(*(np.ascontiguousarray(field[subset]) for field in x)), again, NO_UPDATES)
    assert np.array_equal(again, out[subset])


def amx_linear(packed, x):
    """The product [T, O] in bfloat16."""
    rows, padded_rows = len(x.bf16_tiles), len(x.bf16_tiles) + -len(x.bf16_tiles) % 16
    out = torch.full((padded_rows, 32 * len(packed.data)), float("nan")).numpy()
    linear(counters(), SCRATCH_ADDRESS, columns(packed), x, out[:rows], NO_UPDATES)
    return torch.from_numpy(out[:rows, : packed.outputs])


@needs_amx
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 100),
    st.sampled_from([1, 2, 3, 7, 18, 19, 48]),
    names_of,
    st.floats(1e-2, 1e2),
    st.data(),
)
def test_bfloat16_product_with_bits_independent_of_batch(rows, outputs, units, name, magnitude, data):
    units = min(units, 3) if LAYOUTS[name].blocks > 1 else units
    weight = random_weight(name, outputs, units * LAYOUTS[name].unit_inputs, rows, magnitude)
    packed, values = packed_weights.pack(weight), torch.from_numpy(normal(rows + 1, rows, weight.inputs)).bfloat16()
    out = amx_linear(packed, from_bf16(values))
    exact, magnitudes = torch.from_numpy(dequantized_weight(weight)).double(), values.double().abs()
    expected = values.double() @ exact.T
    # A weight is off by half a unit in the last place of bfloat16, its offset by a bit of its scale.
    steps = steps_of(weight).double()
    bound = magnitudes @ (2**-8 * exact.abs() + 2**-9 * steps).T + 1e-5 * magnitudes @ exact.abs().T
    assert ((out.double() - expected).abs() <= bound + 1e-30).all()
    subset = draw_row_range(data, rows)
    assert torch.equal(amx_linear(packed, from_bf16(values[subset])), out[subset])


@needs_amx
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_dequantized_to_the_nearest_bfloat16(name):
    """The product with the unit matrix yields each weight as it was multiplied."""
    weight = random_weight(name, 40, 512, 1)
    weights = amx_linear(packed_weights.pack(weight), from_bf16(torch.eye(weight.inputs))).T
    assert torch.equal(weights, weights.bfloat16().float())
    exact = torch.from_numpy(dequantized_weight(weight))
    assert ((weights - exact).abs() <= 2**-8 * exact.abs() + 2**-9 * steps_of(weight)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), names_of, names_of, activations_of)
def test_int8_gated_product(rows, tiles, gate, up, activation):
    pair, packed, x = random_gate_up(rows, tiles, (gate, up))
    out = empty_int8(rows, 32 * tiles)
    gate_up_linear(counters(), 0, pair_columns(packed), activation, x, out, np.zeros((32, 64), np.float32), NO_UPDATES)
    weights = [torch.from_numpy(dequantized_weight(weight)) for weight in pair]
    assert_close_int8(out, reference_glu(activation, dequantized(x), weights))


WIDE_REGISTERS = re.compile(r"%(zmm\d+|k[0-7]|[xy]mm(1[6-9]|2\d|3[01]))\b")


def test_machine_code_uses_registers_of_the_target_cpu():
    """Without AVX-512 there are 16 registers of 32 bytes, and no mask registers."""
    x, out = random_int8(1, 64, 0), empty_int8(1, 32)
    weight = packed_weights.quantize(normal(0, 64, 64), 4)
    pair = packed_weights.pack_pair(
        packed_weights.quantize(normal(0, 32, 64), 4), packed_weights.quantize(normal(1, 32, 64), 4)
    )
    linear(counters(), 0, columns(packed_weights.pack(weight)), x, np.zeros((1, 64), np.float32), NO_UPDATES)
    gate_up_linear(
        counters(), 0, pair_columns(pair), vector_ops.SILU, x, out, np.zeros((32, 64), np.float32), NO_UPDATES
    )
    for assembly in [gate_up_linear.assembly, *(layout_kernels.assembly(name) for name in ("Q4_1", "Q6_K", "IQ4_XS"))]:
        assert "%ymm" in assembly or "%zmm" in assembly
        assert bool(WIDE_REGISTERS.search(assembly)) == isa.has_features("avx512f")


@needs_amx
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 3), names_of, names_of, activations_of)
def test_bfloat16_gated_product(rows, tiles, gate, up, activation):
    pair, packed, x = random_gate_up(rows, tiles, (gate, up))
    out, buffer, values = empty_bf16(rows, 32 * tiles), torch.zeros(32, 64).numpy(), dequantized(x).bfloat16()
    gate_up_linear(
        counters(), SCRATCH_ADDRESS, pair_columns(packed), activation, from_bf16(values), out, buffer, NO_UPDATES
    )
    weights = [amx_linear(packed_weights.pack(weight), from_bf16(torch.eye(256))).T for weight in pair]
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


@compiled_kernel
def glu_rows(pairs, activation, out):
    for half in range(2):
        for row in range(0, pairs.shape[1], 4):
            pair, target = address_of(pairs[half, row]), address_of(out[row, 16 * half :])
            if activation == vector_ops.SILU:
                vector_ops.glu_x4_to_bf16(0, pair, target)
            else:
                vector_ops.glu_x4_to_bf16(1, pair, target)


def random_gate_up(rows, tiles, names):
    """(the weights of gate and up, both packed as one, activations)."""
    pair = [random_weight(name, 32 * tiles, 256, 2 * rows + i, 1e-4) for i, name in enumerate(names)]
    return pair, packed_weights.pack_pair(*pair), random_int8(rows, 256, 3)


def reference_glu(activation, x, weights):
    multiply = ops.silu_and_multiply if activation == vector_ops.SILU else ops.gelu_tanh_and_multiply
    return multiply(torch.cat([x @ weight.T for weight in weights], -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_inputs_give_non_finite_results(bad):
    weight, x = packed_weights.pack(packed_weights.quantize(np.ones((32, 32), np.float32), 8)), torch.ones(1, 32)
    x[0, 5] = bad
    quantized, out = empty_int8(1, 32), np.zeros((1, 32), np.float32)
    quantize_into(x.numpy(), quantized)
    linear(counters(), 0, columns(weight), quantized, out, NO_UPDATES)
    assert not np.isfinite(out).any()
    if SCRATCH_ADDRESS:
        quantize_into(x.numpy(), quantized := empty_bf16(1, 32))
        assert not amx_linear(weight, quantized).isfinite().any()


@compiled_kernel
def quantize_into(x, out):
    quantize_blocks(address_of(x), out, 0, x.shape[1] // 32)
