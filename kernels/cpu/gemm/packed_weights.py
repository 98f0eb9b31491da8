"""Packs weights into tiles (`layouts`), from GGUF's blocks without loss, or from floats rounded to 4 or 8 bits.

Rows are packed a few tiles at a time, so that the intermediate arrays stay in a core's cache. `run` runs these jobs, by
several threads where the caller has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.gguf_blocks import UNPACK
from plait.kernels.cpu.gemm.layouts import (
    GROUP_INPUTS,
    HALF_TILE,
    LAYOUTS,
    QUANT_BLOCK,
    TILE_OUTPUTS,
    PackedLayout,
)
from plait.kernels.cpu.kernel_args import aligned_empty
from plait.kernels.gguf_types import BLOCK_SHAPES

Bytes = npt.NDArray[np.uint8]
ROUNDED_LAYOUTS = {4: "Q4_1", 8: "Q8_0"}  # bits -> the layout of weights that `quantize` rounds
CHUNK_WEIGHTS = 1 << 18  # weights that a thread unpacks at a time
RunJobs = Callable[[Callable[[Any], None], Sequence[Any]], None]  # calls a function with each of some jobs


def run_in_turn(run: Callable[[Any], None], jobs: Sequence[Any]) -> None:
    """Runs jobs one after the other."""
    for job in jobs:
        run(job)


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the layout of `layouts`; behind the `outputs` real rows the last tile has weights of 0."""

    data: Bytes  # [tiles, units, bytes of a unit]
    layout: PackedLayout
    outputs: int

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def inputs(self) -> int:
        return int(self.data.shape[1]) * self.layout.unit_inputs

    @property
    def tile_bytes(self) -> int:
        return int(self.data.shape[1]) * self.layout.unit_bytes


def block_bytes(layout: PackedLayout) -> int:
    """Bytes of the inputs of a unit in GGUF's blocks, which for floats are single numbers."""
    values, size = BLOCK_SHAPES[layout.name]
    return layout.unit_inputs // values * size


@dataclass(frozen=True)
class StoredWeight:
    """A weight [O, C] in GGUF's blocks of a layout: uint8 [O, bytes of a row]."""

    rows: Bytes
    layout: PackedLayout

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.layout)

    @property
    def inputs(self) -> int:
        return int(self.rows.shape[1]) // self.block_bytes * self.layout.unit_inputs


def from_gguf(raw: Bytes, quantization: str, shape: tuple[int, ...]) -> StoredWeight | None:
    """Returns a matrix as it is stored, uint8 [O, bytes of a row], as a weight; None for a type without a layout."""
    layout = LAYOUTS.get(quantization)
    if layout is None or len(shape) != 2 or shape[1] % layout.unit_inputs:
        return None
    return StoredWeight(raw.reshape(shape[0], -1), layout)


def quantize(weight: npt.NDArray[np.float32], bits: int, run: RunJobs = run_in_turn) -> StoredWeight:
    """`quantize_rows` of a float weight [O, C]."""
    return quantize_rows((len(weight), weight.shape[1]), lambda rows: weight[rows], bits, run)


def quantize_rows(
    shape: tuple[int, ...], read: Callable[[slice], npt.NDArray[np.float32]], bits: int, run: RunJobs = run_in_turn
) -> StoredWeight:
    """Rounds a float weight [O, C], of which `read` returns some rows, to Q4_1 or Q8_0.

    In 4 bits between the block's smallest and largest value, in 8 bits by the largest magnitude. Rounds a few rows at a
    time. Raises ValueError unless C is a multiple of 32.
    """
    outputs, inputs = shape
    if inputs % QUANT_BLOCK:
        raise ValueError(f"the weight's {inputs} inputs are not a multiple of {QUANT_BLOCK}")
    layout = LAYOUTS[ROUNDED_LAYOUTS[bits]]
    rounded = np.empty((outputs, inputs // QUANT_BLOCK * block_bytes(layout)), np.uint8)
    step = max(1, CHUNK_WEIGHTS // inputs)

    def round_rows(first: int) -> None:
        rows = slice(first, first + step)
        rounded[rows] = _rounded_blocks(read(rows), bits)

    run(round_rows, range(0, outputs, step))
    return StoredWeight(rounded, layout)


def _rounded_blocks(weight: npt.NDArray[np.float32], bits: int) -> Bytes:
    """Rows of GGUF's blocks."""
    blocks = weight.reshape(len(weight), -1, QUANT_BLOCK)
    if bits == 8:
        scales, minima = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16), None
        integers = _divide(blocks, scales).clip(-128, 127).astype(np.int8).view(np.uint8)
    else:
        lowest, highest = blocks.min(-1), blocks.max(-1)
        scales, minima = ((highest - lowest) / np.float32(15)).astype(np.float16), lowest.astype(np.float16)
        quants = _divide(blocks - minima.astype(np.float32)[..., None], scales).clip(0, 15).astype(np.uint8)
        integers = quants[..., :16] | quants[..., 16:] << np.uint8(4)
    halves = [x[..., None].view(np.uint8) for x in (scales, minima) if x is not None]
    return np.concatenate([*halves, integers], -1).reshape(len(weight), -1)


def _divide(blocks: npt.NDArray[np.float32], scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    """Divides blocks by their scales, and rounds; 0 where the scale is 0."""
    steps = scales.astype(np.float32)[..., None]
    quotients: npt.NDArray[np.float32] = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)
    return np.rint(quotients)


def pack(weight: StoredWeight, run: RunJobs = run_in_turn) -> PackedWeight:
    """Packs a weight into tiles."""
    tiles = -(-len(weight.rows) // TILE_OUTPUTS)
    data = _empty(weight, tiles)
    _pack_into([(weight, data)], run)
    return PackedWeight(data, weight.layout, len(weight.rows))


def pack_concatenated(parts: Sequence[StoredWeight], run: RunJobs = run_in_turn) -> tuple[PackedWeight, ...]:
    """Packs weights with the same inputs, to be multiplied as one; neighbours of the same layout become one weight.

    All but the last must have a multiple of 32 outputs.
    """
    merged: list[StoredWeight] = []
    for part in parts:
        if merged and merged[-1].layout == part.layout:
            merged[-1] = StoredWeight(np.concatenate([merged[-1].rows, part.rows]), part.layout)
        else:
            merged.append(part)
    return tuple(pack(part, run) for part in merged)


@dataclass(frozen=True)
class PackedPair:
    """Two weights of the same shape, whose tiles alternate: gate and up of a gated product. Layouts may differ."""

    data: Bytes  # [tiles, bytes of a tile of both]
    first: PackedWeight
    second: PackedWeight

    @property
    def stride(self) -> int:
        """Bytes from one tile of a weight to its next."""
        return int(self.data.shape[1])


def pack_pair(first: StoredWeight, second: StoredWeight, run: RunJobs = run_in_turn) -> PackedPair:
    """Packs two weights of the same shape so that their tiles alternate."""
    tiles = -(-len(first.rows) // TILE_OUTPUTS)
    sizes = [weight.inputs // weight.layout.unit_inputs * weight.layout.unit_bytes for weight in (first, second)]
    data = aligned_empty((tiles, sum(sizes)), np.uint8)
    pair = pair_of(data, (first.layout, second.layout), (len(first.rows), len(second.rows)), sizes[0])
    _pack_into([(first, pair.first.data), (second, pair.second.data)], run)
    return pair


def pair_of(
    data: Bytes, layouts: tuple[PackedLayout, PackedLayout], outputs: tuple[int, int], first_bytes: int
) -> PackedPair:
    """Two weights whose tiles alternate in memory [tiles, bytes]; `first_bytes`: of a tile of the first one."""
    halves = [data[:, :first_bytes], data[:, first_bytes:]]
    one, two = (
        PackedWeight(half.reshape(len(data), -1, layout.unit_bytes), layout, rows)
        for half, layout, rows in zip(halves, layouts, outputs, strict=True)
    )
    return PackedPair(data, one, two)


def _empty(weight: StoredWeight, tiles: int) -> Bytes:
    """Memory for a packed weight, which begins at a cache line."""
    return aligned_empty((tiles, weight.inputs // weight.layout.unit_inputs, weight.layout.unit_bytes), np.uint8)


def _pack_into(targets: Sequence[tuple[StoredWeight, Bytes]], run: RunJobs) -> None:
    """Packs weights into their memory."""
    jobs = []
    for weight, data in targets:
        tiles_per_job = max(1, CHUNK_WEIGHTS // (TILE_OUTPUTS * weight.inputs))
        jobs += [(weight, data, first, first + tiles_per_job) for first in range(0, len(data), tiles_per_job)]
    run(lambda job: _pack_tiles(*job), jobs)


def _pack_tiles(weight: StoredWeight, data: Bytes, first: int, last: int) -> None:
    """Packs tiles [first, last) of a weight."""
    layout, target = weight.layout, data[first:last]
    rows = _pad_outputs(weight.rows[first * TILE_OUTPUTS : last * TILE_OUTPUTS])
    if layout.is_float:
        words = np.ascontiguousarray(rows).view(np.uint32)
        lines = words.reshape(len(target), 2, HALF_TILE, target.shape[1], layout.bits)
        np.copyto(
            target.view(np.uint32).reshape(*target.shape[:2], 2, layout.bits, HALF_TILE), lines.transpose(0, 3, 1, 4, 2)
        )
        return
    unpacked = UNPACK[layout.name](rows.reshape(-1, weight.block_bytes))
    halves = [x[:, None].view(np.uint8) for x in (unpacked.scale, unpacked.minimum) if x is not None]
    _write_numbers(halves, target[:, :, None, : layout.blocks_offset])
    blocks = target[:, :, layout.blocks_offset :].reshape(*target.shape[:2], layout.blocks, layout.block_bytes)
    _write_lines(layout, unpacked.quants, blocks[..., : layout.scales_offset])
    small = [x for x in (unpacked.scales, unpacked.minima) if x is not None]
    _write_numbers(small, blocks[..., layout.scales_offset :])


def _write_numbers(kinds: Sequence[Bytes], target: Bytes) -> None:
    """Writes scales and minima, each [N, bytes], one kind behind the other to [tiles, units, blocks, bytes]."""
    tiles, units, blocks, _ = target.shape
    begin = 0
    for values in kinds:
        items = np.ascontiguousarray(values).view(f"u{values.shape[1] // blocks}")  # a block's 1 or 2 bytes
        end = begin + TILE_OUTPUTS * items.itemsize
        outputs = items.reshape(tiles, TILE_OUTPUTS, units, blocks)
        np.copyto(target[..., begin:end].view(items.dtype), outputs.transpose(0, 2, 3, 1))
        begin = end


def _write_lines(layout: PackedLayout, quants: Bytes, target: Bytes) -> None:
    """Writes the lines of quants [N, inputs of a unit] to [tiles, units, blocks, bytes], in words of 4 inputs."""
    tiles, units = target.shape[:2]
    words = np.ascontiguousarray(quants).view(np.uint32).reshape(-1)
    to = target.view(np.uint32).reshape(tiles, units, layout.blocks, 2, -1, HALF_TILE)
    shift = line = 0
    for width in layout.widths:
        fields = (words >> np.uint32(shift)) & np.uint32(0x01010101 * (2**width - 1)) if width < layout.bits else words
        parts = fields.reshape(-1, 8 // width)
        lines = parts[:, 0].copy()
        for i in range(1, 8 // width):
            lines |= parts[:, i] << np.uint32(width * i)
        outputs = lines.reshape(tiles, 2, HALF_TILE, units, layout.blocks, width)
        np.copyto(to[..., line : line + width, :], outputs.transpose(0, 3, 4, 1, 5, 2))
        shift, line = shift + width, line + width


@cache
def _byte_order(layout: PackedLayout) -> npt.NDArray[np.intp]:
    """For each byte of a unit, its place among the unit's 32 outputs side by side."""
    size = layout.output_bytes
    places, parts, begin = np.arange(TILE_OUTPUTS * size).reshape(TILE_OUTPUTS, size), [], 0
    block = [(GROUP_INPUTS * layout.bits, True), (layout.scale_bytes, False), (layout.minima_bytes, False)]
    for width, are_quants in [(2, False)] * layout.float16_numbers + block * layout.blocks:
        part = places[:, begin : begin + width]
        if are_quants:
            part = part.reshape(2, HALF_TILE, -1, GROUP_INPUTS).swapaxes(1, 2)
        parts.append(part.reshape(-1))
        begin += width
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
    order = _byte_order(weight.layout)
    places = np.argsort(order).reshape(TILE_OUTPUTS, -1)  # where the bytes of an output are
    tile, lane = ids // TILE_OUTPUTS, ids % TILE_OUTPUTS
    outputs = np.take_along_axis(weight.data[tile], places[lane][:, None, :], axis=-1)
    tiles = _tiles_of_outputs(_pad_outputs(outputs))
    data = aligned_empty((len(tiles), *weight.data.shape[1:]), np.uint8)
    np.take(tiles, order, axis=-1, out=data, mode="clip")
    return PackedWeight(data, weight.layout, len(ids))
