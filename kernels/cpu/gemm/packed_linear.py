"""The matrix products of a decoder step: int8 activations by `int8_kernel`, bfloat16 activations by `amx_blocking`.

An item of a phase is a tile of 32 outputs for all rows, or two tiles of a gated product. A row's bits depend on the
type of its activations, and on nothing else.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.gemm import amx_blocking
from plait.kernels.cpu.gemm.adapter_reads import list_memory, list_next_down, list_up, updated_rows
from plait.kernels.cpu.gemm.amx_blocking import NO_ACTIVATION, GemmTask, TileStream
from plait.kernels.cpu.gemm.amx_kernel import TILE_BYTES
from plait.kernels.cpu.gemm.layout_calls import call_output, call_product
from plait.kernels.cpu.gemm.layouts import TILE_OUTPUTS
from plait.kernels.cpu.kernel_types import TILE_COLUMNS, TILES_OF_UP, PrefetchList, QuantizedActivations, RowUpdates
from plait.kernels.cpu.parallel.threads import ThreadContext, shared_ranges
from plait.kernels.cpu.vector_ops import address_of

# A weight is one or several parts, whose outputs follow each other and whose layouts may differ. Columns of a part: the
# address of its first tile, the bytes from one tile to the next, its tiles, and the functions of its layout
# (`LayoutKernel`).
TILES_AT, TILE_STRIDE, NUM_TILES, PRODUCT, DEQUANTIZE, MULTIPLY_PASS, OUTPUT, PART_COLUMNS = range(8)


def linear(ctx: ThreadContext, phase: int, parts: Any, x: QuantizedActivations, out: Any, updates: RowUpdates) -> None:
    """Multiplies x [T, C] with a packed weight [O, C], and adds `updates`; writes out [T, O] float32.

    `parts` int64: PART_COLUMNS for each part of the weight. For bfloat16 activations `out` must have room for a
    multiple of 16 rows.
    """
    rows, blocks = x.scales.shape
    items = out.shape[1] // TILE_OUTPUTS
    memory = list_memory()
    for first, last in shared_ranges(ctx, phase, items):
        ahead = PrefetchList(memory, 0)
        if len(updates.slots) > 1:  # one row waits for the weights as it is
            ahead = list_up(ahead, updates, 0, rows, first, last - first)
            ahead = list_next_down(ahead, updates, first, last, items)
        begin = 0  # the first tile of the part
        for i in range(0, len(parts), PART_COLUMNS):
            stream = TileStream(
                parts[i + DEQUANTIZE], parts[i + MULTIPLY_PASS], parts[i + TILES_AT], parts[i + TILE_STRIDE]
            )
            tiles, target = parts[i + NUM_TILES], address_of(out) + 4 * TILE_OUTPUTS * begin
            part_first, part_last = max(first - begin, 0), min(last - begin, tiles)
            if part_first < part_last and len(x.bf16_tiles):
                task = GemmTask(
                    NO_ACTIVATION, stream, stream, blocks, address_of(x.bf16_tiles), target, 4 * out.shape[1],
                    part_first, part_last,
                )  # fmt: skip
                amx_blocking.amx_gemm(task, rows, ctx.scratch)
            elif part_first < part_last:
                multiply_tiles(
                    parts[i + PRODUCT], stream, part_first, part_last, x, 0, rows,
                    target + 4 * TILE_OUTPUTS * part_first, 4 * out.shape[1], 4 * TILE_OUTPUTS, ahead,
                )  # fmt: skip
            begin += tiles
        if len(updates.slots):
            add_up(
                updates, 0, rows, first, address_of(out) + 4 * TILE_OUTPUTS * first, 4 * out.shape[1], last - first,
                4 * TILE_OUTPUTS,
            )  # fmt: skip


def add_up(
    updates: RowUpdates, first_row: int, rows: int, tile: int, out: int, out_stride: int, tiles: int, tile_stride: int
) -> None:
    """Adds the updates of some rows to `tiles` tiles of outputs from `tile` on.

    out: the address of the first row's first tile; the others follow after `out_stride` and `tile_stride` bytes.
    """
    for row, entry in updated_rows(updates, first_row, rows):
        terms = address_of(updates.terms) + 4 * row * updates.terms.shape[1]
        target = out + (row - first_row) * out_stride
        for i in range(tiles):
            described = entry[TILES_OF_UP] + 8 * TILE_COLUMNS * (tile + i)
            vector_ops.add_products_at(target + i * tile_stride, terms, described)


def multiply_tiles(
    function: int,
    stream: TileStream,
    first: int,
    last: int,
    x: QuantizedActivations,
    begin: int,
    rows: int,
    out: int,
    out_stride: int,
    out_tile_stride: int,
    ahead: PrefetchList,
) -> None:
    """Multiplies int8 rows [begin, begin + rows) with tiles [first, last); `function`: their layout's `product`.

    It prefetches `ahead` meanwhile, as far as it gets.
    """
    blocks, x_stride = x.scales.shape[1], int(x.quants.shape[1])
    offset, tile = 4 * begin * blocks, stream.tiles + first * stream.stride
    quants, scales = address_of(x.quants) + begin * x_stride, address_of(x.scales) + offset
    block_sums, half_sums = address_of(x.block_sums) + offset, address_of(x.half_sums) + offset
    call_product(
        function,
        (
            tile, stream.stride, last - first, quants, x_stride, scales, block_sums, half_sums, blocks,
            out, out_stride, out_tile_stride, rows, ahead.address, ahead.length,
        ),
    )  # fmt: skip


def gate_up_linear(
    ctx: ThreadContext,
    phase: int,
    parts: Any,
    activation: int,
    x: QuantizedActivations,
    out: QuantizedActivations,
    gate_up_buffer: Any,
    updates: RowUpdates,
) -> None:
    """Computes out [T, F] = activation(gate) * up; `parts` are the gate and up, as in `linear`.

    `gate_up_buffer` float32 [rows, 64] holds gate and up of a few rows of int8 products. `updates`: of gate and then
    up, for int8 activations.
    """
    blocks = x.scales.shape[1]
    items = out.quants.shape[1] // TILE_OUTPUTS
    gate = TileStream(parts[DEQUANTIZE], parts[MULTIPLY_PASS], parts[TILES_AT], parts[TILE_STRIDE])
    second = parts[PART_COLUMNS:]
    up = TileStream(second[DEQUANTIZE], second[MULTIPLY_PASS], second[TILES_AT], second[TILE_STRIDE])
    for first, last in shared_ranges(ctx, phase, items):
        if len(x.bf16_tiles):
            tiles, target = address_of(x.bf16_tiles), address_of(out.bf16_tiles)
            stride = TILE_BYTES * out.scales.shape[1]
            task = GemmTask(activation, gate, up, blocks, tiles, target, stride, 2 * first, 2 * last)
            amx_blocking.amx_gemm(task, len(x.scales), ctx.scratch)
        else:
            functions = (parts[PRODUCT], second[PRODUCT])
            gate_up_tiles(functions, gate, up, activation, x, out, first, last, gate_up_buffer, updates)


def gate_up_tiles(
    functions: Any,
    gate: TileStream,
    up: TileStream,
    activation: int,
    x: QuantizedActivations,
    out: QuantizedActivations,
    first: int,
    last: int,
    gate_up_buffer: Any,
    updates: RowUpdates,
) -> None:
    """Computes items of `gate_up_linear` for int8 activations, as many rows and then items as the buffer holds.

    Tiles of the gate and of `up` alternate, so that weights of one layout are one stream, in the order of their memory.
    """
    rows, buffer_rows, buffer = len(x.scales), len(gate_up_buffer), address_of(gate_up_buffer)
    pair_bytes, one_layout = 8 * TILE_OUTPUTS, functions[0] == functions[1]
    both = TileStream(gate.dequantize, gate.multiply_pass, gate.tiles, up.tiles - gate.tiles)
    memory, tiles = list_memory(), out.scales.shape[1]
    for begin in range(0, rows, buffer_rows):
        count = min(buffer_rows, rows - begin)
        step = buffer_rows // count if one_layout else 1
        stride = step * pair_bytes
        for item in range(first, last, step):
            end, ahead = min(last, item + step), PrefetchList(memory, 0)
            if len(updates.slots) > 1:
                for i in range(2):
                    ahead = list_up(ahead, updates, begin, count, i * tiles + item, end - item)
                ahead = list_next_down(ahead, updates, item, end, tiles)
            if one_layout:
                multiply_tiles(
                    functions[0], both, 2 * item, 2 * end, x, begin, count, buffer, stride, 4 * TILE_OUTPUTS, ahead
                )
            else:
                up_buffer = buffer + 4 * TILE_OUTPUTS
                multiply_tiles(functions[0], gate, item, end, x, begin, count, buffer, stride, pair_bytes, ahead)
                multiply_tiles(functions[1], up, item, end, x, begin, count, up_buffer, stride, pair_bytes, ahead)
            if len(updates.slots):
                add_up(updates, begin, count, item, buffer, stride, end - item, pair_bytes)
                add_up(updates, begin, count, tiles + item, buffer + 4 * TILE_OUTPUTS, stride, end - item, pair_bytes)
            for row in range(count):
                for i in range(item, end):
                    pair = buffer + stride * row + pair_bytes * (i - item)
                    _glu_block(activation, pair, out, begin + row, i)


def dequantize_row(part: Any, row: int, blocks: int, out: int) -> None:
    """Writes output `row` of a weight of one part to float32 [32 * blocks] at `out`."""
    tile = part[TILES_AT] + row // TILE_OUTPUTS * part[TILE_STRIDE]
    call_output(part[OUTPUT], tile, row % TILE_OUTPUTS, blocks, out)


def _glu_block(activation: int, pair: int, out: QuantizedActivations, row: int, block: int) -> None:
    """Quantizes activation(gate) * up of one block of 32 channels; gate and up lie behind each other at `pair`."""
    index, up = row * out.scales.shape[1] + block, pair + 4 * TILE_OUTPUTS
    quants, scale = address_of(out.quants) + TILE_OUTPUTS * index, address_of(out.scales) + 4 * index
    block_sum, half_sums = address_of(out.block_sums) + 4 * index, address_of(out.half_sums) + 4 * index
    vector_ops.glu_quantize_block(activation, pair, up, quants, scale, block_sum, half_sums)
