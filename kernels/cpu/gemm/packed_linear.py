"""The matrix products of a decoder step: int8 activations by `int8_kernel`, bfloat16 activations by `amx_blocking`.

An item of a phase is a tile of 32 outputs for all rows, or two tiles of a gated product. A row's bits depend on the
form of its activations, and on nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.gemm import amx_blocking
from plait.kernels.cpu.gemm.amx_blocking import NO_ACTIVATION, GemmTask
from plait.kernels.cpu.gemm.amx_kernel import TILE_BYTES
from plait.kernels.cpu.gemm.int8_kernel import MAX_ROWS, tile
from plait.kernels.cpu.gemm.packed_layout import TILE_OUTPUTS, packed_block_bytes
from plait.kernels.cpu.jit import inner_njit
from plait.kernels.cpu.kernel_types import QuantizedActivations
from plait.kernels.cpu.threads import ThreadContext, barrier_wait, claim_local_work, items_per_claim, mark_done
from plait.kernels.cpu.vector_ops import address_of


@inner_njit
def linear(ctx: ThreadContext, phase: int, weight: int, bits: int, x: QuantizedActivations, out: Any) -> None:
    """Multiplies x [T, C] with the packed weight [O, C] at address `weight`; writes out [T, O] float32.

    For bfloat16 activations `out` must have room for a multiple of 16 rows.
    """
    rows, blocks = x.scales.shape
    items = out.shape[1] // TILE_OUTPUTS
    count = items_per_claim(items, ctx)
    tile_bytes = blocks * packed_block_bytes(bits)
    strides = (np.int64(x.qvalues.shape[1]), np.int64(4 * blocks), np.int64(4 * out.shape[1]))
    while True:
        first, last = claim_local_work(ctx.counters, phase, count, items, ctx.thread_id, ctx.num_threads)
        if first >= items:
            break
        if len(x.bf16_tiles):
            tiles, stride = address_of(x.bf16_tiles), 4 * out.shape[1]
            task = GemmTask(bits, NO_ACTIVATION, weight, blocks, tiles, address_of(out), stride, first, last)
            amx_blocking.amx_gemm(task, rows, ctx.scratch)
        else:
            for item in range(first, last):
                weight_tile, target = weight + item * tile_bytes, address_of(out) + 4 * TILE_OUTPUTS * item
                qvalues, scales, sums = address_of(x.qvalues), address_of(x.scales), address_of(x.block_sums)
                int8_gemm(bits, weight_tile, qvalues, strides, scales, sums, blocks, target, rows)
        mark_done(ctx.counters, phase, last - first)
    barrier_wait(ctx.counters, phase, items)


@inner_njit
def gate_up_linear(
    ctx: ThreadContext,
    phase: int,
    weight: int,
    bits: int,
    activation: int,
    x: QuantizedActivations,
    out: QuantizedActivations,
    gate_up_buffer: Any,
) -> None:
    """Computes out [T, F] = activation(gate) * up from one packed weight, whose tiles alternate between gate and up.

    `gate_up_buffer` float32 [rows, 64] holds gate and up of a few rows of int8 products.
    """
    blocks = x.scales.shape[1]
    items = out.qvalues.shape[1] // TILE_OUTPUTS
    count = items_per_claim(items, ctx)
    tile_bytes = blocks * packed_block_bytes(bits)
    while True:
        first, last = claim_local_work(ctx.counters, phase, count, items, ctx.thread_id, ctx.num_threads)
        if first >= items:
            break
        if len(x.bf16_tiles):
            tiles, target = address_of(x.bf16_tiles), address_of(out.bf16_tiles)
            stride = TILE_BYTES * out.scales.shape[1]
            task = GemmTask(bits, activation, weight, blocks, tiles, target, stride, 2 * first, 2 * last)
            amx_blocking.amx_gemm(task, len(x.scales), ctx.scratch)
        else:
            for item in range(first, last):
                _gate_up_tile(
                    bits, weight + 2 * item * tile_bytes, tile_bytes, activation, x, out, item, gate_up_buffer
                )
        mark_done(ctx.counters, phase, last - first)
    barrier_wait(ctx.counters, phase, items)


@inner_njit
def _gate_up_tile(
    bits: int,
    tiles: int,
    tile_bytes: int,
    activation: int,
    x: QuantizedActivations,
    out: QuantizedActivations,
    item: int,
    gate_up_buffer: Any,
) -> None:
    """Computes one item of `gate_up_linear` for int8 activations, as many rows at a time as the buffer holds."""
    rows, blocks = x.scales.shape
    buffer_rows, stride = len(gate_up_buffer), np.int64(x.qvalues.shape[1])
    strides = (stride, np.int64(4 * blocks), np.int64(8 * TILE_OUTPUTS))
    for begin in range(0, rows, buffer_rows):
        count = min(buffer_rows, rows - begin)
        qvalues = address_of(x.qvalues) + begin * stride
        scales, block_sums = address_of(x.scales) + 4 * begin * blocks, address_of(x.block_sums) + 4 * begin * blocks
        for part in range(2):
            target, weight_tile = address_of(gate_up_buffer) + 4 * TILE_OUTPUTS * part, tiles + part * tile_bytes
            int8_gemm(bits, weight_tile, qvalues, strides, scales, block_sums, blocks, target, count)
        for row in range(count):
            _glu_block(activation, address_of(gate_up_buffer) + 8 * TILE_OUTPUTS * row, out, begin + row, item)


@inner_njit
def int8_gemm(
    bits: int, weight: int, x: int, strides: Any, scales: int, block_sums: int, blocks: int, out: int, rows: int
) -> None:
    """Computes a tile of 32 outputs for any number of rows, as many at a time as registers hold.

    The kernel needs `bits` and the number of rows as literals, hence the branches.
    """
    row = 0
    while row < rows:
        left = rows - row
        x_at, out_at = x + row * strides[0], out + row * strides[2]
        scales_at, sums_at = scales + row * strides[1], block_sums + row * strides[1]
        if bits == 4:
            if left >= MAX_ROWS:
                tile(4, MAX_ROWS, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
                row += MAX_ROWS
            elif left >= 4:
                tile(4, 4, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
                row += 4
            elif left >= 2:
                tile(4, 2, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
                row += 2
            else:
                tile(4, 1, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
                row += 1
        elif left >= MAX_ROWS:
            tile(8, MAX_ROWS, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
            row += MAX_ROWS
        elif left >= 4:
            tile(8, 4, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
            row += 4
        elif left >= 2:
            tile(8, 2, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
            row += 2
        else:
            tile(8, 1, weight, x_at, strides, scales_at, sums_at, blocks, out_at)
            row += 1


@inner_njit
def _glu_block(activation: int, pair: int, out: QuantizedActivations, row: int, block: int) -> None:
    """Quantizes activation(gate) * up of one block of 32 channels; gate and up lie behind each other at `pair`."""
    index, up = row * out.scales.shape[1] + block, pair + 4 * TILE_OUTPUTS
    qvalues, scale = address_of(out.qvalues) + TILE_OUTPUTS * index, address_of(out.scales) + 4 * index
    block_sum = address_of(out.block_sums) + 4 * index
    if activation == vector_ops.SILU:
        vector_ops.glu_quantize_block(0, pair, up, qvalues, scale, block_sum)
    else:
        vector_ops.glu_quantize_block(1, pair, up, qvalues, scale, block_sum)
