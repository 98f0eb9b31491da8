"""The products of a decoder's step on a CPU: activations in 8 bits by `cpu_tile`, or in bfloat16 by `amx_blocking`.

An item of a phase is a tile of 32 outputs for all rows, of a gated product two. A row's bits depend on the form its
activations have, and on nothing else.

Knows: one product at a time. Must not know: the order of phases, which form is chosen when.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.gemm import amx_blocking
from plait.kernels.cpu.gemm.amx_blocking import NO_ACTIVATION, GemmTask
from plait.kernels.cpu.gemm.int8_kernel import MAX_ROWS, TILE_OUTPUTS, block_bytes, tile
from plait.kernels.cpu.ops import QuantizedActivations, ThreadContext, items_per_claim
from plait.kernels.cpu.threads import barrier_wait, claim_local_work, mark_done
from plait.kernels.cpu.vector_ops import address_of

INT4_BLOCK_BYTES, INT8_BLOCK_BYTES = block_bytes(4), block_bytes(8)


@numba.njit  # type: ignore[untyped-decorator]
def linear(team: ThreadContext, phase: int, weight: int, bits: int, x: QuantizedActivations, out: Any) -> None:
    """out [T, O] = x times the packed weight [O, C]; in bfloat16 it has room up to a multiple of 16 rows."""
    rows, blocks = x.scales.shape
    items = out.shape[1] // TILE_OUTPUTS
    count = items_per_claim(items, team)
    tile_bytes = blocks * (INT4_BLOCK_BYTES if bits == 4 else INT8_BLOCK_BYTES)
    strides = (np.int64(x.qvalues.shape[1]), np.int64(4 * blocks), np.int64(4 * out.shape[1]))
    while True:
        first, last = claim_local_work(team.counters, phase, count, items, team.thread_id, team.num_threads)
        if first >= items:
            break
        if len(x.bf16_tiles):
            work = GemmTask(
                bits,
                NO_ACTIVATION,
                weight,
                blocks,
                address_of(x.bf16_tiles),
                address_of(out),
                4 * out.shape[1],
                first,
                last,
            )
            amx_blocking.amx_gemm(work, rows, team.scratch)
        else:
            for item in range(first, last):
                tile_at, out_at = weight + item * tile_bytes, address_of(out) + 4 * TILE_OUTPUTS * item
                sources = address_of(x.qvalues), address_of(x.scales), address_of(x.block_sums)
                int8_gemm(bits, tile_at, sources[0], strides, sources[1], sources[2], blocks, out_at, rows)
        mark_done(team.counters, phase, last - first)
    barrier_wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def gate_up_linear(
    team: ThreadContext,
    phase: int,
    weight: int,
    bits: int,
    activation: int,
    x: QuantizedActivations,
    out: QuantizedActivations,
    gate_up_buffer: Any,
) -> None:
    """out [T, F] = gate(g) * u, with g and u from the packed weight whose tiles alternate between the two."""
    blocks = x.scales.shape[1]
    items = out.qvalues.shape[1] // TILE_OUTPUTS
    count = items_per_claim(items, team)
    tile_bytes = blocks * (INT4_BLOCK_BYTES if bits == 4 else INT8_BLOCK_BYTES)
    while True:
        first, last = claim_local_work(team.counters, phase, count, items, team.thread_id, team.num_threads)
        if first >= items:
            break
        if len(x.bf16_tiles):
            to, stride = address_of(out.bf16_tiles), 1024 * out.scales.shape[1]
            work = GemmTask(bits, activation, weight, blocks, address_of(x.bf16_tiles), to, stride, 2 * first, 2 * last)
            amx_blocking.amx_gemm(work, len(x.scales), team.scratch)
        else:
            for item in range(first, last):
                _gate_up_tile(
                    bits, weight + 2 * item * tile_bytes, tile_bytes, activation, x, out, item, gate_up_buffer
                )
        mark_done(team.counters, phase, last - first)
    barrier_wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
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
    rows, blocks = x.scales.shape
    few, stride = len(gate_up_buffer), np.int64(x.qvalues.shape[1])
    strides = (stride, np.int64(4 * blocks), np.int64(8 * TILE_OUTPUTS))
    for begin in range(0, rows, few):
        here = min(few, rows - begin)
        qvalues = address_of(x.qvalues) + begin * stride
        scales, block_sums = address_of(x.scales) + 4 * begin * blocks, address_of(x.block_sums) + 4 * begin * blocks
        for part in range(2):
            place, tile_at = address_of(gate_up_buffer) + 4 * TILE_OUTPUTS * part, tiles + part * tile_bytes
            int8_gemm(bits, tile_at, qvalues, strides, scales, block_sums, blocks, place, here)
        for row in range(here):
            _glu_block(activation, address_of(gate_up_buffer) + 8 * TILE_OUTPUTS * row, out, begin + row, item)


@numba.njit  # type: ignore[untyped-decorator]
def int8_gemm(
    bits: int, weight: int, x: int, strides: Any, scales: int, block_sums: int, blocks: int, out: int, rows: int
) -> None:
    """One tile of 32 outputs for any number of rows, as many at a time as registers hold."""
    row = 0
    while row < rows:
        left = rows - row
        x_at, scales_at, sums_at, out_at = (
            x + row * strides[0],
            scales + row * strides[1],
            block_sums + row * strides[1],
            out + row * strides[2],
        )
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


@numba.njit  # type: ignore[untyped-decorator]
def _glu_block(activation: int, pair: int, out: QuantizedActivations, row: int, block: int) -> None:
    place = row * out.scales.shape[1] + block
    qvalues, scale = address_of(out.qvalues) + TILE_OUTPUTS * place, address_of(out.scales) + 4 * place
    if activation == vector_ops.SILU:
        vector_ops.glu_quantize_block(
            0, pair, pair + 4 * TILE_OUTPUTS, qvalues, scale, address_of(out.block_sums) + 4 * place
        )
    else:
        vector_ops.glu_quantize_block(
            1, pair, pair + 4 * TILE_OUTPUTS, qvalues, scale, address_of(out.block_sums) + 4 * place
        )
