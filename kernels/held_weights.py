"""Quantized weights of checkpoints in the forms that torch and Triton multiply by, without rounding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from plait.kernels.quantized_matrix import Floats, Grid, QuantizedMatrix
from plait.kernels.quantized_weights import Float8Weight, Int4Weight, Int8Weight, pack_int4

STEP = 32  # input channels that must share a scale


def weight_bits(weight: Int4Weight | Int8Weight) -> int:
    """Bits of a weight's codes."""
    return 4 if isinstance(weight, Int4Weight) else 8


def hold(matrix: QuantizedMatrix, device: torch.device | str = "cpu") -> Int4Weight | Int8Weight | None:
    """The same weight for the products on a device; None if no form holds it.

    None: groups of other sizes than multiples of 32, integers of 8 bits around another number than 128, groups in any
    order (act-order) of different sizes or with 8 bits, float8 in blocks of other sizes than multiples of 64 inputs.
    """
    grid, inputs = matrix.grid, matrix.codes.shape[1]
    if grid.group < inputs and grid.group % STEP:
        return None
    if grid.kind in ("int4", "table4"):
        return _hold_int4(matrix, device)
    if grid.groups is not None or (grid.kind == "int8" and not bool((np.asarray(grid.zeros) == 128).all())):
        return None
    if grid.kind == "e4m3" and grid.group < inputs and grid.group % (2 * STEP):
        return None
    scales = _of_outputs(grid, len(matrix.codes))
    held = torch.from_numpy(scales[:, 0].copy()) if scales.shape[1] == 1 else _narrowed(scales).T.contiguous()
    group = grid.group if scales.shape[1] > 1 else STEP
    if grid.kind == "e4m3":
        codes = _bytes(matrix.codes, device)
        return Float8Weight(codes, held.to(device), group, grid.quantizes_activations, grid.row_block)
    return Int8Weight(_bytes(matrix.codes ^ np.uint8(128), device).view(torch.int8), held.to(device), group)


def _hold_int4(matrix: QuantizedMatrix, device: torch.device | str) -> Int4Weight | None:
    grid, codes = matrix.grid, matrix.codes
    order: npt.NDArray[np.int64] | None = None
    if grid.groups is not None:
        sizes = np.bincount(grid.groups, minlength=grid.scales.shape[1])
        if (sizes[:-1] != grid.group).any():
            return None
        order = np.argsort(grid.groups, kind="stable").astype(np.int64)
        codes = codes[:, order]
    scales = _of_outputs(grid, len(codes))
    zeros = np.broadcast_to(np.asarray(grid.zeros, np.float32), scales.shape)
    is_symmetric = grid.table is not None or bool((zeros == 8).all())
    # Exact for scales of 16 bits: their 11 or 8 bits times 5.
    minima = None if is_symmetric else torch.from_numpy(-(zeros * scales)).to(device)
    group = grid.group if scales.shape[1] > 1 else -(-codes.shape[1] // STEP) * STEP
    packed = pack_int4(_bytes(codes, device), _narrowed(scales).to(device), minima, group)
    table = None if grid.table is None else torch.from_numpy(grid.table).to(device)
    held_order = None if order is None else torch.from_numpy(order).to(device)
    return Int4Weight(packed.packed, packed.scales, packed.minima, group, packed.in_features, table, held_order)


def _of_outputs(grid: Grid, outputs: int) -> Floats:
    """Scales [N, G]."""
    scales: Floats = np.repeat(grid.scales, grid.row_block, axis=0)[:outputs]
    return scales


def _narrowed(scales: Floats) -> torch.Tensor:
    """The scales in the narrowest float that holds them exactly."""
    wide = torch.from_numpy(np.ascontiguousarray(scales))
    return next(
        (wide.to(dtype) for dtype in (torch.float16, torch.bfloat16) if torch.equal(wide.to(dtype).float(), wide)), wide
    )


def _bytes(codes: npt.NDArray[np.uint8], device: torch.device | str) -> torch.Tensor:
    """A copy: the codes may be a file mapped read-only."""
    return torch.from_numpy(np.array(codes, order="C")).to(device)
