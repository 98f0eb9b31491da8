"""Calls a form's compiled functions on single tiles and outputs, from Python."""

from __future__ import annotations

import ctypes

import numpy as np

from plait.kernels.cpu.gemm.form_kernels import FormKernel, form_kernel
from plait.kernels.cpu.gemm.int8_kernel import ProductArgs
from plait.kernels.cpu.gemm.packed_weights import PackedWeight
from plait.kernels.cpu.kernel_types import QuantizedActivations


def _call(address: int, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def product(weight: PackedWeight, x: QuantizedActivations, kernel: FormKernel | None = None) -> np.ndarray:
    """The product [rows, O] in int8, all tiles in one call."""
    rows, blocks = x.scales.shape
    out = np.full((rows, TILE * len(weight.data)), np.nan, np.float32)
    addresses = (x.scales.ctypes.data, x.block_sums.ctypes.data, x.half_sums.ctypes.data)
    args = ProductArgs(
        weight.address, weight.tile_bytes, len(weight.data), x.qvalues.ctypes.data, x.qvalues.strides[0], *addresses,
        blocks, out.ctypes.data, out.strides[0], 4 * TILE, rows,
    )  # fmt: skip
    memory = np.array(args, np.int64)
    _call((kernel or form_kernel(weight.form.name)).product, memory.ctypes.data)
    return out[:, : weight.outputs]


def unpacked(weight: PackedWeight, kernel: FormKernel | None = None) -> np.ndarray:
    """The weight [O, C] as the function that reads embeddings dequantizes it."""
    out = np.full((weight.outputs, weight.inputs), np.nan, np.float32)
    function = (kernel or form_kernel(weight.form.name)).output
    for row in range(weight.outputs):
        tile = weight.address + row // TILE * weight.tile_bytes
        _call(function, tile, row % TILE, weight.inputs // 32, out[row].ctypes.data)
    return out


TILE = 32  # outputs of a tile
