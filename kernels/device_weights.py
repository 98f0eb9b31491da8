"""Quantized weights of checkpoints in the layouts that torch and Triton multiply by, without rounding."""

from __future__ import annotations

import numpy as np
import torch

from plait.kernels.coded_weights import CodedWeight, pack_int4
from plait.kernels.quantized_matrix import Floats, Grid, e4m3_numbers
from plait.kernels.quantized_weights import Float8Weight, Int8Weight

STEP = 32  # input channels that must share a scale
DEQUANTIZE_CHUNK = 1 << 25  # numbers at a time: their indices and scales need three times as much memory


def device_weight_bits(grid: Grid) -> int | None:
    """The bits of a weight's codes in the layout that `device_weight` returns; None if none can hold the weight.

    None: groups of other sizes than multiples of 32, integers of 8 bits around another number than 128, groups in any
    order (act-order) of different sizes or with 8 bits, float8 in blocks of other sizes than multiples of 64 inputs.
    """
    has_groups = grid.scales.shape[1] > 1
    if has_groups and grid.group % STEP:
        return None
    if grid.kind in ("int4", "table4"):
        if grid.groups is None:
            return 4
        sizes = np.bincount(grid.groups, minlength=grid.scales.shape[1])
        return None if (sizes[:-1] != grid.group).any() else 4
    if grid.groups is not None or (grid.kind == "int8" and not bool((np.asarray(grid.zeros) == 128).all())):
        return None
    return None if grid.kind == "e4m3" and has_groups and grid.group % (2 * STEP) else 8


def device_weight(grid: Grid, codes: torch.Tensor) -> CodedWeight | Int8Weight:
    """The weight of codes uint8 [N, K] for the products on their device. May keep `codes`.

    `device_weight_bits(grid)` must not be None.
    """
    if grid.kind in ("int4", "table4"):
        return _int4_device_weight(grid, codes)
    scales = _of_outputs(grid, len(codes))
    narrow_scales = torch.from_numpy(scales[:, 0].copy()) if scales.shape[1] == 1 else _narrowed(scales).T.contiguous()
    group = grid.group if scales.shape[1] > 1 else STEP
    if grid.kind == "e4m3":
        return Float8Weight(codes, narrow_scales.to(codes.device), group, grid.quantizes_activations, grid.row_block)
    return Int8Weight((codes ^ 128).view(torch.int8), narrow_scales.to(codes.device), group)


def dequantize_codes(grid: Grid, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`quantized_matrix.dequantize` of codes uint8 [N, K] on their device, to the same bits, rounded to `dtype`."""
    (outputs, inputs), device = codes.shape, codes.device
    groups = np.arange(inputs) // grid.group if grid.groups is None else grid.groups
    columns = torch.from_numpy(groups.astype(np.int64)).to(device)
    numbers_by_code = {"e4m3": e4m3_numbers(), "table4": grid.table}.get(grid.kind)
    table = None if numbers_by_code is None else torch.from_numpy(numbers_by_code).to(device)
    scales = torch.from_numpy(_of_outputs(grid, outputs)).to(device)
    zeros = np.full((outputs, 1), grid.zeros) if isinstance(grid.zeros, int) else grid.zeros
    middles = torch.from_numpy(zeros.astype(np.float32)).to(device)

    def of_inputs(values: torch.Tensor) -> torch.Tensor:
        return values if values.shape[1] == 1 else values[:, columns]

    result, step = torch.empty((outputs, inputs), dtype=dtype, device=device), max(1, DEQUANTIZE_CHUNK // inputs)
    for rows in (slice(first, first + step) for first in range(0, outputs, step)):
        numbers = codes[rows].float() if table is None else table[codes[rows].int()]
        if table is None:
            numbers -= of_inputs(middles[rows])
        numbers *= of_inputs(scales[rows])
        result[rows] = numbers
    return result


def _int4_device_weight(grid: Grid, codes: torch.Tensor) -> CodedWeight:
    device, order = codes.device, None
    if grid.groups is not None:
        order = torch.from_numpy(np.argsort(grid.groups, kind="stable").astype(np.int64)).to(device)
        codes = codes[:, order]
    scales = _of_outputs(grid, len(codes))
    zeros = np.broadcast_to(np.asarray(grid.zeros, np.float32), scales.shape)
    is_symmetric = grid.table is not None or bool((zeros == 8).all())
    # Exact for scales of 16 bits: their 11 or 8 bits times 5.
    minima = None if is_symmetric else torch.from_numpy(-(zeros * scales)).to(device)
    group = grid.group if scales.shape[1] > 1 else -(-codes.shape[1] // STEP) * STEP
    table = None if grid.table is None else torch.from_numpy(grid.table).to(device)
    return pack_int4(codes, _narrowed(scales).to(device), minima, group, table, order)


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
