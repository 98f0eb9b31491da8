"""Passes of 32 rows through panels: how a product in bfloat16 goes through its weight.

A chunk of up to 18 blocks of a tile's 32 columns is widened to a panel, which stays in the first cache while all rows
pass over it: activations are read past that cache (TILELOADDT1), without which a pass takes a third longer. The first
pass widens as it multiplies. Sums that are not whole after a chunk wait in memory. Of a gated product a panel has 16
columns of the gate and 16 of its partner, so that each pass has all that is needed, and its gates are computed while
the next one multiplies:

    chunk    a0 a0 a0 a0 a1 a1 a1 a1 b0 b0 b0 b0      a, b: columns, each in two chunks
    rows      0 32 64 96  0 32 64 96  0 32 64 96
    gated                    0 32 64 96               rows of a whose sums are whole

Knows: tiles, addresses. Must not know: threads, phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from plait.kernels import cpu_amx, cpu_panel, cpu_rows
from plait.kernels.cpu_panel import PANEL_BYTES, RESULT_BYTES, TILE_BYTES
from plait.kernels.cpu_tile import HALF, WIDTH, block_bytes

CHUNK = 18  # blocks, at most: 36 KB of a first cache of 48
PAIR = 2 * cpu_amx.ROWS  # rows of a pass
GROUP = 8  # passes whose sums there is room for
FOUR = 4  # rows that are gated at once
NO_GATE = -1
RING, WHOLE = 1, -1  # how much of a panel is kept: its last two blocks, where only one pass reads it
BYTES_4, BYTES_8 = block_bytes(4), block_bytes(8)
# In a thread's scratch: a panel; sums of two passes that are gated; sums of a group of passes that wait.
GATES_AT = cpu_amx.PANELS_AT + CHUNK * PANEL_BYTES
SUMS_AT = GATES_AT + 2 * RESULT_BYTES
SCRATCH_BYTES = SUMS_AT + GROUP * RESULT_BYTES - cpu_amx.PANELS_AT


class Work(NamedTuple):
    """A product's rows through columns first .. last of 32 each, a gated one's 16 of the gate and 16 others."""

    bits: int
    gate: int  # NO_GATE, or one of `cpu_rows`
    weight: int
    blocks: int
    x: int  # tiles of 16 rows and 32 inputs of bfloat16
    out: int  # float32 in rows of `step` bytes; gated: tiles of bfloat16, `step` bytes for 16 rows
    step: int
    first: int
    last: int


class Chunk(NamedTuple):
    """Packed blocks, for each half of a panel the first numbers and scales, and where they are widened to."""

    numbers: int
    ends: int
    other_numbers: int
    other_ends: int
    blocks: int
    panel: int
    mask: int  # RING or WHOLE


class Gating(NamedTuple):
    """Sums of a pass, 16 of the gate and 16 others a row, and where 16 bfloat16 of each row go."""

    sums: int
    to: int
    step: int  # bytes from 16 rows to the next
    fours: int  # of rows; 0: there is nothing to do


@numba.njit  # type: ignore[untyped-decorator]
def multiply(work: Work, rows: int, scratch: int) -> None:
    """As many rows at a time as there is room for their sums."""
    for begin in range(0, rows, GROUP * PAIR):
        _multiply_group(work, begin, min(rows, begin + GROUP * PAIR), scratch)


@numba.njit  # type: ignore[untyped-decorator]
def _multiply_group(work: Work, begin: int, end: int, scratch: int) -> None:
    chunks = (work.blocks + CHUNK - 1) // CHUNK if end - begin > PAIR else 1  # a ring is no larger for more blocks
    gating = _nothing_to_gate()
    spare, other = scratch + GATES_AT, scratch + GATES_AT + RESULT_BYTES
    for place in range((work.last - work.first) * chunks):
        columns, index = work.first + place // chunks, place % chunks
        first_block, last_block = index * work.blocks // chunks, (index + 1) * work.blocks // chunks
        chunk = _chunk(work, columns, first_block, last_block, scratch, end - begin)
        for row in range(begin, end, PAIR):
            sums = scratch + SUMS_AT + (row - begin) // PAIR * RESULT_BYTES
            out, step = sums, 4 * WIDTH
            if last_block == work.blocks and work.gate == NO_GATE:
                out, step = work.out + row * work.step + 4 * WIDTH * columns, work.step
            elif last_block == work.blocks:
                out = spare
            x, x_step = work.x + 64 * row * work.blocks + TILE_BYTES * first_block, TILE_BYTES * work.blocks
            two, fresh = end - row > cpu_amx.ROWS, row == begin
            _pass(two, fresh, work.bits, x, x_step, chunk, sums if index else 0, out, step, work.gate, gating)
            gating = _nothing_to_gate()
            if last_block == work.blocks and work.gate != NO_GATE:
                to = work.out + row // cpu_amx.ROWS * work.step + TILE_BYTES * (columns // 2) + 2 * HALF * (columns % 2)
                gating = Gating(spare, to, work.step, (min(PAIR, end - row) + FOUR - 1) // FOUR)
                spare, other = other, spare
    _gate(work.gate, gating, 0, PAIR // FOUR)


@numba.njit  # type: ignore[untyped-decorator]
def _nothing_to_gate() -> Any:
    return Gating(0, 0, 0, 0)


@numba.njit  # type: ignore[untyped-decorator]
def _chunk(work: Work, columns: int, begin: int, end: int, scratch: int, rows: int) -> Any:
    """Blocks begin .. end of some columns, for so many rows."""
    size = BYTES_4 if work.bits == 4 else BYTES_8
    qvalue_bytes, tile_bytes = size - 4 * WIDTH, work.blocks * size
    if work.gate == NO_GATE:
        half, other_half = 0, 1
        tile = other = work.weight + columns * tile_bytes + begin * size
    else:
        half = other_half = columns % 2
        tile = work.weight + columns // 2 * 2 * tile_bytes + begin * size
        other = tile + tile_bytes
    return Chunk(
        tile + half * (qvalue_bytes // 2),
        tile + qvalue_bytes + 2 * HALF * half,
        other + other_half * (qvalue_bytes // 2),
        other + qvalue_bytes + 2 * HALF * other_half,
        end - begin,
        scratch + cpu_amx.PANELS_AT,
        WHOLE if rows > PAIR else RING,
    )


@numba.njit  # type: ignore[untyped-decorator]
def _pass(
    two: bool,
    fresh: bool,
    bits: int,
    x: int,
    x_step: int,
    chunk: Chunk,
    sums: int,
    out: int,
    step: int,
    gate: int,
    gating: Gating,
) -> None:
    """16 or 32 rows (`two`) over a chunk, which is widened for it (`fresh`) or was; `sums` (0: none) to `out`."""
    if two:
        if sums:
            cpu_panel.take_up(2, sums, 4 * WIDTH)
        else:
            cpu_panel.clear(2)
    elif sums:
        cpu_panel.take_up(1, sums, 4 * WIDTH)
    else:
        cpu_panel.clear(1)
    fours = (PAIR // FOUR + chunk.blocks - 1) // chunk.blocks
    if fresh:
        _widen(bits, chunk, 0)
    for block in range(chunk.blocks):
        if fresh and block + 1 < chunk.blocks:
            _widen(bits, chunk, block + 1)
        panel = chunk.panel + PANEL_BYTES * (block & chunk.mask)
        if two:
            cpu_panel.multiply_block(2, x + TILE_BYTES * block, x_step, panel)
        else:
            cpu_panel.multiply_block(1, x + TILE_BYTES * block, x_step, panel)
        if gating.fours:
            _gate(gate, gating, block * fours, (block + 1) * fours)
    if two:
        cpu_panel.hand_out(2, out, step)
    else:
        cpu_panel.hand_out(1, out, step)


@numba.njit  # type: ignore[untyped-decorator]
def _widen(bits: int, chunk: Chunk, block: int) -> None:
    to = chunk.panel + PANEL_BYTES * (block & chunk.mask)
    if bits == 4:
        at = block * BYTES_4
        cpu_panel.widen_half(4, chunk.numbers + at, chunk.ends + at, to)
        cpu_panel.widen_half(4, chunk.other_numbers + at, chunk.other_ends + at, to + TILE_BYTES)
    else:
        at = block * BYTES_8
        cpu_panel.widen_half(8, chunk.numbers + at, chunk.ends + at, to)
        cpu_panel.widen_half(8, chunk.other_numbers + at, chunk.other_ends + at, to + TILE_BYTES)


@numba.njit  # type: ignore[untyped-decorator]
def _gate(gate: int, gating: Gating, begin: int, end: int) -> None:
    """Fours of rows from `begin` on, as far as there are some."""
    for four in range(begin, min(end, gating.fours)):
        sums = gating.sums + four * FOUR * 4 * WIDTH
        to = gating.to + four * FOUR // cpu_amx.ROWS * gating.step + 64 * (four * FOUR % cpu_amx.ROWS)
        if gate == cpu_rows.SILU:
            cpu_rows.gate_four(0, sums, to)
        else:
            cpu_rows.gate_four(1, sums, to)
