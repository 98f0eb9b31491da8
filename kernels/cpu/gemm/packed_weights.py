"""Packs weights into tiles (`forms`), from GGUF's blocks without loss, or from floats rounded to 4 or 8 bits.

Rows are packed a few tiles at a time, so that the intermediate arrays stay in a core's cache, by several threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.forms import (
    FORMS,
    GROUP_INPUTS,
    HALF_TILE,
    QUANT_BLOCK,
    TILE_OUTPUTS,
    Form,
)
from plait.kernels.cpu.gemm.gguf_blocks import UNPACK, Unpacked
from plait.kernels.cpu.kernel_args import aligned_empty

Bytes = npt.NDArray[np.uint8]
ROUNDED_FORMS = {4: "Q4_1", 8: "Q8_0"}  # bits -> the form of weights that `quantize` rounds
CHUNK_WEIGHTS = 1 << 17  # weights that a thread unpacks at a time


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout of `forms`; behind the `outputs` real rows the last tile has zeros."""

    data: Bytes  # [tiles, units, bytes of a unit]
    form: Form
    outputs: int

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def inputs(self) -> int:
        return int(self.data.shape[1]) * self.form.unit_inputs

    @property
    def tile_bytes(self) -> int:
        return int(self.data.shape[1]) * self.form.unit_bytes


@dataclass(frozen=True)
class StoredWeight:
    """A weight [O, C] in GGUF's blocks of a form: uint8 [O, bytes of a row]."""

    rows: Bytes
    form: Form

    @property
    def block_bytes(self) -> int:
        return GGUF_BLOCK_BYTES[self.form.name]

    @property
    def inputs(self) -> int:
        return int(self.rows.shape[1]) // self.block_bytes * self.form.unit_inputs


GGUF_BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
    "F16": 64,  # of 32 numbers, which the gguf package counts one by one
    "BF16": 64,
    "F32": 128,
}


def from_gguf(raw: Bytes, quantization: str, shape: tuple[int, ...]) -> StoredWeight | None:
    """Returns the stored bytes of a matrix, uint8 [O, bytes of a row], as a weight; None for a type without a form."""
    form = FORMS.get(quantization)
    if form is None or len(shape) != 2 or shape[1] % form.unit_inputs:
        return None
    return StoredWeight(raw.reshape(shape[0], -1), form)


def quantize(weight: npt.NDArray[np.float32], bits: int) -> StoredWeight:
    """`quantize_rows` of a float weight [O, C]."""
    return quantize_rows((len(weight), weight.shape[1]), lambda rows: weight[rows], bits)


def quantize_rows(shape: tuple[int, ...], read: Callable[[slice], npt.NDArray[np.float32]], bits: int) -> StoredWeight:
    """Rounds a float weight [O, C], of which `read` returns some rows, to Q4_1 or Q8_0.

    In 4 bits between the block's smallest and largest value, in 8 bits by the largest magnitude. Rounds a few rows at a
    time, by several threads. Raises ValueError unless C is a multiple of 32.
    """
    outputs, inputs = shape
    if inputs % QUANT_BLOCK:
        raise ValueError(f"the weight's {inputs} inputs are not a multiple of {QUANT_BLOCK}")
    form = FORMS[ROUNDED_FORMS[bits]]
    rounded = np.empty((outputs, inputs // QUANT_BLOCK * GGUF_BLOCK_BYTES[form.name]), np.uint8)
    step = max(1, CHUNK_WEIGHTS // inputs)

    def round_rows(first: int) -> None:
        rows = slice(first, first + step)
        rounded[rows] = _rounded_blocks(read(rows), bits)

    _run_jobs(round_rows, range(0, outputs, step))
    return StoredWeight(rounded, form)


def _rounded_blocks(weight: npt.NDArray[np.float32], bits: int) -> Bytes:
    """Rows of GGUF's blocks."""
    blocks = weight.reshape(len(weight), -1, QUANT_BLOCK)
    if bits == 8:
        scales, minima = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16), None
        integers = _divide(blocks, scales).clip(-128, 127).astype(np.int8).view(np.uint8)
    else:
        lowest, highest = blocks.min(-1), blocks.max(-1)
        scales, minima = ((highest - lowest) / np.float32(15)).astype(np.float16), lowest.astype(np.float16)
        qvalues = _divide(blocks - minima.astype(np.float32)[..., None], scales).clip(0, 15).astype(np.uint8)
        integers = qvalues[..., :16] | qvalues[..., 16:] << np.uint8(4)
    halves = [x[..., None].view(np.uint8) for x in (scales, minima) if x is not None]
    return np.concatenate([*halves, integers], -1).reshape(len(weight), -1)


def _divide(blocks: npt.NDArray[np.float32], scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    """Divides blocks by their scales, and rounds; 0 where the scale is 0."""
    steps = scales.astype(np.float32)[..., None]
    quotients: npt.NDArray[np.float32] = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
    return np.rint(quotients)


def pack(weight: StoredWeight) -> PackedWeight:
    """Packs a weight into tiles."""
    tiles = -(-len(weight.rows) // TILE_OUTPUTS)
    data = _empty(weight, tiles)
    _pack_into([(weight, data)])
    return PackedWeight(data, weight.form, len(weight.rows))


def pack_concatenated(parts: Sequence[StoredWeight]) -> tuple[PackedWeight, ...]:
    """Packs weights with the same inputs, to be multiplied as one; neighbours of the same form become one weight.

    All but the last must have a multiple of 32 outputs.
    """
    merged: list[StoredWeight] = []
    for part in parts:
        if merged and merged[-1].form == part.form:
            merged[-1] = StoredWeight(np.concatenate([merged[-1].rows, part.rows]), part.form)
        else:
            merged.append(part)
    return tuple(pack(part) for part in merged)


@dataclass(frozen=True)
class PackedPair:
    """Two weights of the same shape, whose tiles alternate: gate and up of a gated product. Their forms may differ."""

    data: Bytes  # [tiles, bytes of a tile of both]
    first: PackedWeight
    second: PackedWeight

    @property
    def stride(self) -> int:
        """Bytes from one tile of a weight to its next."""
        return int(self.data.shape[1])


def pack_pair(first: StoredWeight, second: StoredWeight) -> PackedPair:
    """Packs two weights of the same shape so that their tiles alternate."""
    tiles = -(-len(first.rows) // TILE_OUTPUTS)
    sizes = [weight.inputs // weight.form.unit_inputs * weight.form.unit_bytes for weight in (first, second)]
    data = aligned_empty((tiles, sum(sizes)), np.uint8)
    halves = [data[:, : sizes[0]], data[:, sizes[0] :]]
    views = [
        half.reshape(tiles, -1, weight.form.unit_bytes) for half, weight in zip(halves, (first, second), strict=True)
    ]
    _pack_into([(first, views[0]), (second, views[1])])
    one, two = (
        PackedWeight(view, weight.form, len(weight.rows)) for view, weight in zip(views, (first, second), strict=True)
    )
    return PackedPair(data, one, two)


def _empty(weight: StoredWeight, tiles: int) -> Bytes:
    """Memory for a packed weight, which begins at a cache line."""
    return aligned_empty((tiles, weight.inputs // weight.form.unit_inputs, weight.form.unit_bytes), np.uint8)


def _pack_into(targets: Sequence[tuple[StoredWeight, Bytes]]) -> None:
    """Packs weights into their memory, with as many threads as there are processors."""
    jobs = []
    for weight, data in targets:
        tiles_per_job = max(1, CHUNK_WEIGHTS // (TILE_OUTPUTS * weight.inputs))
        jobs += [(weight, data, first, first + tiles_per_job) for first in range(0, len(data), tiles_per_job)]
    _run_jobs(lambda job: _pack_tiles(*job), jobs)


def _run_jobs(run: Callable[[Any], None], jobs: Sequence[Any]) -> None:
    """Runs jobs, with as many threads as there are processors if they are many."""
    if len(jobs) < 4:
        for job in jobs:
            run(job)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1) as pool:
        for _ in pool.map(run, jobs):
            pass


def _pack_tiles(weight: StoredWeight, data: Bytes, first: int, last: int) -> None:
    """Packs tiles [first, last) of a weight."""
    form, target = weight.form, data[first:last]
    rows = weight.rows[first * TILE_OUTPUTS : last * TILE_OUTPUTS]
    if form.is_float:
        words = _pad_outputs(np.ascontiguousarray(rows).view(np.uint32))
        lines = words.reshape(len(target), 2, HALF_TILE, target.shape[1], form.bits)
        np.copyto(
            target.view(np.uint32).reshape(*target.shape[:2], 2, form.bits, HALF_TILE), lines.transpose(0, 3, 1, 4, 2)
        )
        return
    unpacked = UNPACK[form.name](rows.reshape(-1, weight.block_bytes))
    units = target.shape[1]
    outputs = np.concatenate(_output_bytes(form, unpacked), axis=1).reshape(len(rows), units, -1)
    np.take(_tiles_of_outputs(_pad_outputs(outputs)), _byte_order(form), axis=-1, out=target, mode="clip")


def _output_bytes(form: Form, unpacked: Unpacked) -> list[Bytes]:
    """Returns the bytes of one output in each unit, [N, bytes], in the order of `Form.fields`."""
    count = len(unpacked.qvalues)
    groups = unpacked.qvalues.reshape(count, form.blocks, -1, GROUP_INPUTS)
    lines, shift = [], 0
    for width in form.widths:
        fields = ((groups >> np.uint8(shift)) & np.uint8(2**width - 1)) if len(form.widths) > 1 else groups
        per_line = 8 // width
        fields = fields.reshape(count, form.blocks, -1, per_line, GROUP_INPUTS)
        line = fields[:, :, :, 0].copy()
        for i in range(1, per_line):
            line |= fields[:, :, :, i] << np.uint8(width * i)
        lines.append(line)
        shift += width
    small = [x for x in (unpacked.scales, unpacked.minima) if x is not None]
    halves = [x[:, None].view(np.uint8) for x in (unpacked.scale, unpacked.minimum) if x is not None]
    return [np.concatenate(lines, axis=2).reshape(count, -1), *small, *halves]


@cache
def _byte_order(form: Form) -> npt.NDArray[np.intp]:
    """For each byte of a unit, its place among the unit's 32 outputs side by side."""
    size = form.output_bytes
    places, parts, begin = np.arange(TILE_OUTPUTS * size).reshape(TILE_OUTPUTS, size), [], 0
    for field, (size_in_block, blocks) in enumerate(form.fields):
        part = places[:, begin : begin + size_in_block * blocks]
        if field == 0:
            lines = part.reshape(2, HALF_TILE, blocks, -1, GROUP_INPUTS)
            parts.append(lines.transpose(2, 0, 3, 1, 4).reshape(-1))
        else:
            parts.append(part.reshape(TILE_OUTPUTS, blocks, size_in_block).swapaxes(0, 1).reshape(-1))
        begin += size_in_block * blocks
    return np.concatenate(parts)


def _pad_outputs(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Fills up the outputs, along the first axis, with zeros to whole tiles."""
    missing = -len(x) % TILE_OUTPUTS
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing else x


def _tiles_of_outputs(outputs: Bytes) -> Bytes:
    """Reshapes [O, units, bytes] to [tiles, units, 32 * bytes]."""
    _, units, size = outputs.shape
    tiles = outputs.reshape(-1, TILE_OUTPUTS, units, size).swapaxes(1, 2)
    return np.ascontiguousarray(tiles).reshape(-1, units, TILE_OUTPUTS * size)


def select_outputs(weight: PackedWeight, ids: npt.NDArray[np.int64]) -> PackedWeight:
    """Returns a weight with only the outputs `ids` [k], in that order; products with it have the same bits."""
    order = _byte_order(weight.form)
    places = np.argsort(order).reshape(TILE_OUTPUTS, -1)  # where the bytes of an output are
    tile, lane = ids // TILE_OUTPUTS, ids % TILE_OUTPUTS
    outputs = np.take_along_axis(weight.data[tile], places[lane][:, None, :], axis=-1)
    tiles = _tiles_of_outputs(_pad_outputs(outputs))
    data = aligned_empty((len(tiles), *weight.data.shape[1:]), np.uint8)
    np.take(tiles, order, axis=-1, out=data, mode="clip")
    return PackedWeight(data, weight.form, len(ids))
