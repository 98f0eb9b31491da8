"""Weights of published quantization formats: the held form has the same numbers, and Triton's products are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_matmul as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE, close_enough

from plait.kernels.coded_weights import CodedWeight
from plait.kernels.device_weights import dequantize_codes, device_weight, device_weight_bits
from plait.kernels.quantized_matrix import E2M1, Grid, QuantizedMatrix, dequantize
from plait.kernels.quantized_weights import (
    Float8Weight,
    Int8Weight,
    concat_outputs,
    select_outputs,
)
from plait.kernels.triton.linear import quantized_linear

KINDS = {  # a kind, and whether its group is that of a complete row
    **{f"int4, {group}": ("int4", group, {}) for group in (32, 64, 128, 0)},
    "int4, zero points": ("int4", 64, {"zeros": True}),
    "int4, act-order": ("int4", 32, {"zeros": True, "order": True}),
    "NF4": ("table4", 64, {"table": np.linspace(-1, 1, 16).astype(np.float32) ** 3}),
    "MXFP4": ("table4", 32, {"table": E2M1}),
    "int8": ("int8", 0, {}),
    "int8, 128": ("int8", 128, {}),
    "int8, 96": ("int8", 96, {}),
    "fp8": ("e4m3", 0, {}),
    "fp8, blocks": ("e4m3", 128, {"block": 128}),
}


def random_matrix(name: str, outs: int, channels: int, seed: int) -> QuantizedMatrix:
    kind, group, more = KINDS[name]
    rng = np.random.default_rng(seed)
    group = group or channels
    count, block = -(-channels // group), more.get("block", 1)
    codes = rng.integers(0, 16 if kind in ("int4", "table4") else 256, (outs, channels)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.04, (-(-outs // block), count)).astype(np.float16).astype(np.float32)
    zeros: Any = {"int4": 8, "int8": 128}.get(kind, 0)
    if more.get("zeros"):
        zeros = rng.integers(0, 17, (outs, count)).astype(np.int32)
    if kind == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 1
        scales /= 64
    if kind == "int8":
        scales /= 8
    groups = rng.permutation(np.arange(channels) // group).astype(np.int32) if more.get("order") else None
    return QuantizedMatrix(Grid(kind, scales, group, zeros, block, groups, more.get("table")), codes)


def held(matrix: QuantizedMatrix) -> CodedWeight | Int8Weight:
    weight = device_weight(matrix.grid, torch.from_numpy(matrix.codes).to(DEVICE))
    assert device_weight_bits(matrix.grid) == (4 if isinstance(weight, CodedWeight) else 8)
    return weight


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(KINDS)), st.sampled_from([1, 65, 130]), st.sampled_from([32, 160, 384]), st.integers(0, 999)
)
def test_the_held_form_has_the_same_numbers(name: str, outs: int, channels: int, seed: int) -> None:
    matrix = random_matrix(name, outs, channels, seed)
    weight, expected = held(matrix), torch.from_numpy(dequantize(matrix))
    dense = reference.dequantize(weight)
    assert torch.equal(dense.cpu(), expected)
    for dtype in (torch.float32, torch.bfloat16):
        widened = dequantize_codes(matrix.grid, torch.from_numpy(matrix.codes).to(DEVICE), dtype)
        assert torch.equal(widened.cpu(), expected.to(dtype))
    ids = torch.tensor([outs - 1, 0, outs // 2], dtype=torch.int32, device=DEVICE)
    for rows in (reference.dequantize_rows, quantized_linear.dequantize_rows):
        assert torch.equal(rows(weight, ids, torch.bfloat16).cpu(), expected[ids.cpu().long()].bfloat16())
    chosen = reference.dequantize_rows(select_outputs(weight, ids), torch.arange(3, device=DEVICE), torch.float32)
    assert torch.equal(chosen.cpu(), expected[ids.cpu().long()])
    both = concat_outputs([weight, weight])
    assert torch.equal(
        reference.dequantize_rows(both, torch.arange(2 * outs, device=DEVICE), torch.float32).cpu(),
        torch.cat([expected, expected]),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.integers(1, 70),
    st.sampled_from([1, 65, 130]),
    st.sampled_from([32, 160, 384, 1056]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(0, 999),
)
def test_products_are_those_of_the_dequantized_weight(
    name: str, rows: int, outs: int, channels: int, dtype: torch.dtype, seed: int
) -> None:
    matrix = random_matrix(name, outs, channels, seed)
    weight, x = held(matrix), randn(rows, channels, dtype=dtype, seed=seed)
    bias = randn(outs, dtype=dtype, seed=seed + 1)
    exact = x.float() @ torch.from_numpy(dequantize(matrix)).to(DEVICE).T + bias.float()
    scale = channels**0.5
    for product in (reference.make_linear()(x, weight, bias), quantized_linear.linear(x, weight, bias)):
        torch.testing.assert_close(product.float() / scale, exact / scale, **close_enough(dtype))


@pytest.mark.parametrize("name", ["int4, act-order", "NF4", "fp8, blocks", "int8, 96"])
def test_the_path_for_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "MAX_FUSED_DEQUANT_ROWS", 8)
    monkeypatch.setattr(quantized_linear, "DEQUANT_CHUNK_ELEMENTS", 70 * 160)
    weight, x = held(random_matrix(name, 150, 160, 1)), randn(9, 160, dtype=torch.float16, seed=3)
    few = quantized_linear.linear(x[:8], weight)
    torch.testing.assert_close(quantized_linear.linear(x, weight)[:8] / 12, few / 12, **close_enough(torch.float16))


def test_kinds_that_differ_are_not_stacked() -> None:
    for first, second in (
        ("int4, 32", "int4, 64"),
        ("NF4", "int4, 64"),
        ("NF4", "MXFP4"),
        ("int8", "fp8"),
        ("int8, 128", "int8, 96"),
    ):
        with pytest.raises(ValueError, match="cannot be one weight"):
            concat_outputs([held(random_matrix(name, 8, 384, 0)) for name in (first, second)])
    ordered = [held(random_matrix("int4, act-order", 8, 384, seed)) for seed in (0, 1)]
    with pytest.raises(ValueError, match="cannot be one weight"):
        concat_outputs(ordered)


def test_what_no_form_holds() -> None:
    small, odd = random_matrix("int4, 32", 4, 64, 0), random_matrix("int8", 4, 64, 0)
    ordered = np.arange(64, dtype=np.int32) % 2
    scales = np.ones((4, 4), np.float32)
    for matrix in (
        QuantizedMatrix(Grid("int4", scales, 16, 8), small.codes),
        QuantizedMatrix(Grid("int8", odd.grid.scales, 64, 127), odd.codes),
        QuantizedMatrix(Grid("int8", scales[:, :2], 32, 128, groups=ordered), odd.codes),
        QuantizedMatrix(Grid("int4", scales[:, :2], 32, 8, groups=np.maximum(ordered, np.arange(64) < 9)), small.codes),
        QuantizedMatrix(Grid("e4m3", scales[:, :2], 32), small.codes),
    ):
        assert device_weight_bits(matrix.grid) is None


def test_scales_keep_their_width() -> None:
    def scales_of(value: float) -> torch.dtype:
        return held(
            QuantizedMatrix(Grid("int4", np.full((4, 2), value, np.float32), 32, 8), np.zeros((4, 64), np.uint8))
        ).scales.dtype

    assert [scales_of(value) for value in (0.5, 2.0**-30, 1 + 2.0**-20)] == [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    assert isinstance(held(random_matrix("fp8", 4, 64, 0)), Float8Weight)
