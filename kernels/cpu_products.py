"""The products of a decoder's step on a CPU: activations in 8 bits by `cpu_tile`, or in bfloat16 by `cpu_passes`.

An item of a phase is a tile of 32 outputs for all rows, of a gated product two. A row's bits depend on the form its
activations have, and on nothing else.

Knows: one product at a time. Must not know: the order of phases, which form is chosen when.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels import cpu_passes, cpu_rows
from plait.kernels.cpu_parts import Rounded, Team, portion
from plait.kernels.cpu_passes import NO_GATE, Work
from plait.kernels.cpu_rows import address_of
from plait.kernels.cpu_team import claim_near, finish, wait
from plait.kernels.cpu_tile import MOST_ROWS, WIDTH, block_bytes, tile

BYTES_4, BYTES_8 = block_bytes(4), block_bytes(8)


@numba.njit  # type: ignore[untyped-decorator]
def product(team: Team, phase: int, weight: int, bits: int, x: Rounded, out: Any) -> None:
    """out [T, O] = x times the packed weight [O, C]; in bfloat16 it has room up to a multiple of 16 rows."""
    rows, blocks = x.scales.shape
    items = out.shape[1] // WIDTH
    count = portion(items, team)
    tile_bytes = blocks * (BYTES_4 if bits == 4 else BYTES_8)
    steps = (np.int64(x.numbers.shape[1]), np.int64(4 * blocks), np.int64(4 * out.shape[1]))
    while True:
        first, last = claim_near(team.counters, phase, count, items, team.me, team.num_threads)
        if first >= items:
            break
        if len(x.wide):
            work = Work(
                bits, NO_GATE, weight, blocks, address_of(x.wide), address_of(out), 4 * out.shape[1], first, last
            )
            cpu_passes.amx_gemm(work, rows, team.scratch)
        else:
            for item in range(first, last):
                tile_at, out_at = weight + item * tile_bytes, address_of(out) + 4 * WIDTH * item
                sources = address_of(x.numbers), address_of(x.scales), address_of(x.sums)
                multiply(bits, tile_at, sources[0], steps, sources[1], sources[2], blocks, out_at, rows)
        finish(team.counters, phase, last - first)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def gated_product(
    team: Team, phase: int, weight: int, bits: int, gate: int, x: Rounded, out: Rounded, gates: Any
) -> None:
    """out [T, F] = gate(g) * u, with g and u from the packed weight whose tiles alternate between the two."""
    blocks = x.scales.shape[1]
    items = out.numbers.shape[1] // WIDTH
    count = portion(items, team)
    tile_bytes = blocks * (BYTES_4 if bits == 4 else BYTES_8)
    while True:
        first, last = claim_near(team.counters, phase, count, items, team.me, team.num_threads)
        if first >= items:
            break
        if len(x.wide):
            to, step = address_of(out.wide), 1024 * out.scales.shape[1]
            work = Work(bits, gate, weight, blocks, address_of(x.wide), to, step, 2 * first, 2 * last)
            cpu_passes.amx_gemm(work, len(x.scales), team.scratch)
        else:
            for item in range(first, last):
                _gated_tile(bits, weight + 2 * item * tile_bytes, tile_bytes, gate, x, out, item, gates)
        finish(team.counters, phase, last - first)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def _gated_tile(
    bits: int, tiles: int, tile_bytes: int, gate: int, x: Rounded, out: Rounded, item: int, gates: Any
) -> None:
    rows, blocks = x.scales.shape
    few, step = len(gates), np.int64(x.numbers.shape[1])
    steps = (step, np.int64(4 * blocks), np.int64(8 * WIDTH))
    for begin in range(0, rows, few):
        here = min(few, rows - begin)
        numbers = address_of(x.numbers) + begin * step
        scales, sums = address_of(x.scales) + 4 * begin * blocks, address_of(x.sums) + 4 * begin * blocks
        for part in range(2):
            place, tile_at = address_of(gates) + 4 * WIDTH * part, tiles + part * tile_bytes
            multiply(bits, tile_at, numbers, steps, scales, sums, blocks, place, here)
        for row in range(here):
            _gate(gate, address_of(gates) + 8 * WIDTH * row, out, begin + row, item)


@numba.njit  # type: ignore[untyped-decorator]
def multiply(
    bits: int, weight: int, x: int, steps: Any, scales: int, sums: int, blocks: int, out: int, rows: int
) -> None:
    """One tile of 32 outputs for any number of rows, as many at a time as registers hold."""
    row = 0
    while row < rows:
        left = rows - row
        x_at, scales_at, sums_at, out_at = (
            x + row * steps[0],
            scales + row * steps[1],
            sums + row * steps[1],
            out + row * steps[2],
        )
        if bits == 4:
            if left >= MOST_ROWS:
                tile(4, MOST_ROWS, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += MOST_ROWS
            elif left >= 4:
                tile(4, 4, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 4
            elif left >= 2:
                tile(4, 2, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 2
            else:
                tile(4, 1, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 1
        elif left >= MOST_ROWS:
            tile(8, MOST_ROWS, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
            row += MOST_ROWS
        elif left >= 4:
            tile(8, 4, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
            row += 4
        elif left >= 2:
            tile(8, 2, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
            row += 2
        else:
            tile(8, 1, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
            row += 1


@numba.njit  # type: ignore[untyped-decorator]
def _gate(gate: int, pair: int, out: Rounded, row: int, block: int) -> None:
    place = row * out.scales.shape[1] + block
    numbers, scale = address_of(out.numbers) + WIDTH * place, address_of(out.scales) + 4 * place
    if gate == cpu_rows.SILU:
        cpu_rows.gate_block(0, pair, pair + 4 * WIDTH, numbers, scale, address_of(out.sums) + 4 * place)
    else:
        cpu_rows.gate_block(1, pair, pair + 4 * WIDTH, numbers, scale, address_of(out.sums) + 4 * place)
