"""A quantized weight as checkpoints publish it: codes, the numbers they stand for, scales and zero points (numpy).

weight[n, k] = scales[n // row_block, g] * (number(codes[n, k]) - zeros[n, g]),    g = groups[k], or k // group
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Kind = Literal["int4", "int8", "e4m3", "table4"]
E4M3_NAN = 0x7F  # without the sign
# The numbers of E2M1, by code; the upper half is negative (OCP Microscaling Formats, 2023).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Grid:
    """What decides about a weight [N, K] besides its codes.

    `kind`: codes are integers of 4 or 8 bits without a sign, the bits of float8 e4m3fn, or indices into `table`.
    """

    kind: Kind
    scales: Floats  # [ceil(N / row_block), G]
    group: int  # inputs that share a scale
    zeros: npt.NDArray[np.int32] | int = 0  # the code of the weight 0: of everything, or [N, G]; integers only
    row_block: int = 1  # outputs that share a scale
    groups: npt.NDArray[np.int32] | None = None  # the group of each input [K], where it is not k // group
    table: Floats | None = None  # [16]
    quantizes_activations: bool = True  # e4m3 only: whether the checkpoint is made for activations in float8


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight [N, K]: its grid and its codes, one byte each."""

    grid: Grid
    codes: Codes  # [N, K]


@cache
def e4m3_numbers() -> Floats:
    """The 256 numbers of float8 e4m3fn: sign, 4 bits of exponent with the bias 7, 3 bits of mantissa; no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    magnitude = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)
    magnitude[(codes & 0x7F) == E4M3_NAN] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


def dequantize(matrix: QuantizedMatrix) -> Floats:
    """The weight [N, K] in float32, rounded once."""
    grid, codes = matrix.grid, matrix.codes
    outputs = len(codes)
    if grid.kind == "e4m3":
        numbers = e4m3_numbers()[codes]
    elif grid.kind == "table4":
        assert grid.table is not None
        numbers = grid.table[codes]
    else:
        numbers = codes.astype(np.float32)
        _apply(np.subtract, numbers, np.asarray(grid.zeros, np.float32), grid)
    _apply(np.multiply, numbers, np.repeat(grid.scales, grid.row_block, axis=0)[:outputs], grid)
    return numbers


def select_output_grid(grid: Grid, outputs: int, ranges: Sequence[tuple[int, int]]) -> Grid:
    """The grid of the rows of these ranges, concatenated, of a weight of `outputs` rows.

    Rows share scales in blocks as before if the ranges cut no block but the last.
    """
    block = grid.row_block
    rows = np.concatenate([np.arange(begin, end) for begin, end in ranges])
    zeros = grid.zeros if isinstance(grid.zeros, int) else grid.zeros[rows]
    borders = [*(begin for begin, _ in ranges), *(end for _, end in ranges[:-1])]
    if any(border % block for border in borders):
        scales = np.repeat(grid.scales, block, axis=0)[:outputs][rows]
        return replace(grid, scales=scales, zeros=zeros, row_block=1)
    blocks = np.concatenate([np.arange(begin // block, -(-end // block)) for begin, end in ranges])
    return replace(grid, scales=grid.scales[blocks], zeros=zeros)


def select_input_grid(grid: Grid, inputs: int, begin: int, end: int) -> Grid:
    """The grid of the columns from `begin` up to `end` of a weight of `inputs` columns.

    Groups that they cut, or in any order, become a list of groups.
    """
    if grid.groups is not None:
        return replace(grid, groups=grid.groups[begin:end])
    if grid.scales.shape[1] == 1:
        return replace(grid, group=end - begin)
    if not is_aligned(grid, begin, end, inputs):
        return replace(grid, groups=(np.arange(begin, end) // grid.group).astype(np.int32))
    first, last = begin // grid.group, -(-end // grid.group)
    zeros = grid.zeros if isinstance(grid.zeros, int) or grid.zeros.shape[1] == 1 else grid.zeros[:, first:last]
    return replace(grid, scales=grid.scales[:, first:last], zeros=zeros)


def is_aligned(grid: Grid, begin: int, end: int, inputs: int) -> bool:
    """Whether a range of the inputs consists of complete groups, so that any form that holds the weight holds it."""
    if grid.groups is not None:
        return False
    return grid.scales.shape[1] == 1 or (begin % grid.group == 0 and (end % grid.group == 0 or end == inputs))


def _apply(operator: np.ufunc, numbers: Floats, values: Floats, grid: Grid) -> None:
    """numbers [N, K] = operator(numbers, values) in place, with values of groups [N, G], or one for everything."""
    inputs = numbers.shape[1]
    if values.ndim < 2 or values.shape[1] == 1:
        operator(numbers, values, out=numbers)
    elif grid.groups is None and inputs == values.shape[1] * grid.group:
        grouped = numbers.reshape(len(numbers), -1, grid.group)
        operator(grouped, values[..., None], out=grouped)
    else:
        groups = np.arange(inputs) // grid.group if grid.groups is None else grid.groups
        operator(numbers, values[:, groups], out=numbers)
