"""The phases of a decoder's step on a CPU: each is a number of items that the step's threads share out.

A phase's items may be done in any order by anybody, and what an item computes for a token does not depend on the
other tokens: so a token has the same bits alone, in any batch, in any chunk of its prompt.

Knows: one phase at a time. Must not know: the order of phases, torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_amx, cpu_rows
from plait.kernels.cpu_rows import address_of
from plait.kernels.cpu_team import claim, finish, wait
from plait.kernels.cpu_tile import WIDTH, block_bytes, tile

LANES = 96  # (token, head) pairs that share the reading of keys and values
BYTES_4, BYTES_8 = block_bytes(4), block_bytes(8)


class Team(NamedTuple):
    """Which thread this is, of how many, the counters they share, and this thread's scratch for AMX (0: none)."""

    me: int
    size: int
    counters: int
    scratch: int


class Rounded(NamedTuple):
    """Activations in 8 bits: numbers [T, C] int8, scales and sums [T, C / 32] float32."""

    numbers: Any
    scales: Any
    sums: Any


class Rows(NamedTuple):
    """`layout.AttentionLayout` in arrays, and tiles of tokens, see `cpu_share`."""

    positions: Any
    q_starts: Any
    kv_starts: Any
    first_pages: Any
    pages: Any
    writes: Any
    tiles: Any
    segments: Any
    num_tiles: int
    page_shift: int  # a page holds 1 << page_shift tokens: division would cost more than reading a key


class Heads(NamedTuple):
    """`groups` key heads of `size` channels, `shared` query heads to each."""

    shared: int
    groups: int
    size: int
    scale: float


@numba.njit  # type: ignore[untyped-decorator]
def multiply(
    bits: int, weight: int, x: int, steps: Any, scales: int, sums: int, blocks: int, out: int, rows: int, scratch: int
) -> Any:
    """One tile of 32 outputs for any number of rows, as many at a time as registers hold."""
    if scratch and rows >= cpu_amx.MANY:
        _multiply_sixteens(bits, weight, x, steps, scales, sums, blocks, out, rows, scratch)
        return
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
            if left >= 6:
                tile(4, 6, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 6
            elif left >= 4:
                tile(4, 4, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 4
            elif left >= 2:
                tile(4, 2, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 2
            else:
                tile(4, 1, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
                row += 1
        elif left >= 6:
            tile(8, 6, weight, x_at, steps, scales_at, sums_at, blocks, out_at)
            row += 6
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
def _multiply_sixteens(
    bits: int, weight: int, x: int, steps: Any, scales: int, sums: int, blocks: int, out: int, rows: int, scratch: int
) -> None:
    """`multiply` by AMX, for 16 rows or more; some of the last 16 are computed again, to the same bits."""
    numbers, tile_step, half_step = weight, np.int64(BYTES_8), np.int64(cpu_amx.HALF_BYTES)
    ends, end_step = weight + BYTES_8 - 4 * WIDTH, np.int64(BYTES_8)
    if bits == 4:
        numbers, tile_step, half_step = scratch + cpu_amx.NUMBERS_AT, half_step, blocks * half_step
        ends, end_step = weight + BYTES_4 - 4 * WIDTH, np.int64(BYTES_4)
        cpu_amx.widen(weight, blocks, numbers)
    for first in range(0, rows, cpu_amx.ROWS):
        row = min(first, rows - cpu_amx.ROWS)
        for half in range(2):
            cpu_amx.half_tile(
                numbers + half * half_step,
                ends + WIDTH * half,
                (tile_step, end_step),
                x + row * steps[0],
                steps,
                scales + row * steps[1],
                sums + row * steps[1],
                blocks,
                out + row * steps[2] + 2 * WIDTH * half,
                scratch,
            )


@numba.njit  # type: ignore[untyped-decorator]
def portion(items: int, team: Team) -> int:
    """How many items to claim at once."""
    return max(1, items // (4 * team.size))


@numba.njit  # type: ignore[untyped-decorator]
def product(team: Team, phase: int, weight: int, bits: int, x: Rounded, out: Any) -> None:
    """out [T, O] = x times the packed weight [O, C]."""
    rows, blocks = x.scales.shape
    items = out.shape[1] // WIDTH
    count = portion(items, team)
    tile_bytes = blocks * (BYTES_4 if bits == 4 else BYTES_8)
    steps = (np.int64(x.numbers.shape[1]), np.int64(4 * blocks), np.int64(4 * out.shape[1]))
    while True:
        first = claim(team.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for item in range(first, last):
            multiply(
                bits,
                weight + item * tile_bytes,
                address_of(x.numbers),
                steps,
                address_of(x.scales),
                address_of(x.sums),
                blocks,
                address_of(out) + 4 * WIDTH * item,
                rows,
                team.scratch,
            )
        finish(team.counters, phase, last - first)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def gated_product(
    team: Team, phase: int, weight: int, bits: int, gate: int, x: Rounded, out: Rounded, gates: Any
) -> None:
    """out [T, F] = gate(g) * u, with g and u from the packed weight whose tiles alternate between the two."""
    rows, blocks = x.scales.shape
    items = out.numbers.shape[1] // WIDTH
    count = portion(items, team)
    tile_bytes = blocks * (BYTES_4 if bits == 4 else BYTES_8)
    few, wide = len(gates), np.int64(x.numbers.shape[1])
    steps = (wide, np.int64(4 * blocks), np.int64(8 * WIDTH))
    while True:
        first = claim(team.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for item in range(first, last):
            tiles = weight + 2 * item * tile_bytes
            for begin in range(0, rows, few):
                here = min(few, rows - begin)
                numbers = address_of(x.numbers) + begin * wide
                scales, sums = address_of(x.scales) + 4 * begin * blocks, address_of(x.sums) + 4 * begin * blocks
                for part in range(2):
                    place = address_of(gates) + 4 * WIDTH * part
                    tile_at = tiles + part * tile_bytes
                    multiply(bits, tile_at, numbers, steps, scales, sums, blocks, place, here, team.scratch)
                for row in range(here):
                    _gate(gate, address_of(gates) + 8 * WIDTH * row, out, begin + row, item)
        finish(team.counters, phase, last - first)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def _gate(gate: int, pair: int, out: Rounded, row: int, block: int) -> None:
    blocks = out.scales.shape[1]
    place = row * blocks + block
    numbers, scale = address_of(out.numbers) + WIDTH * place, address_of(out.scales) + 4 * place
    if gate == cpu_rows.SILU:
        cpu_rows.gate_block(0, pair, pair + 4 * WIDTH, numbers, scale, address_of(out.sums) + 4 * place)
    else:
        cpu_rows.gate_block(1, pair, pair + 4 * WIDTH, numbers, scale, address_of(out.sums) + 4 * place)


@numba.njit  # type: ignore[untyped-decorator]
def round_blocks(x: int, out: Rounded, first: int, count: int) -> None:
    """32 * count float32 at x into `out`, whose blocks are counted through all rows, from block `first` on."""
    for place in range(first, first + count):
        cpu_rows.round_block(
            x + 128 * (place - first),
            address_of(out.numbers) + 32 * place,
            address_of(out.scales) + 4 * place,
            address_of(out.sums) + 4 * place,
        )


@numba.njit  # type: ignore[untyped-decorator]
def norm_row(x: int, weight: int, eps: float, channels: int, out: int) -> None:
    """RMS norm (Zhang and Sennrich 2019) of float32 at x."""
    square = cpu_rows.sum_of_squares(x, channels // 16)
    factor = np.float32(1.0) / np.sqrt(square / np.float32(channels) + np.float32(eps))
    cpu_rows.scale_into(x, weight, factor, out, channels // 16)


@numba.njit  # type: ignore[untyped-decorator]
def add_and_norm(
    team: Team, phase: int, x: Any, y: Any, post: int, weight: int, eps: float, normed: Any, out: Rounded
) -> None:
    """x += y (itself normed, where `post` is a weight), then the norm of x to `normed`, and rounded to `out`."""
    items, channels = x.shape
    count = portion(items, team)
    while True:
        first = claim(team.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for row in range(first, last):
            x_at, y_at = address_of(x) + 4 * row * channels, address_of(y) + 4 * row * channels
            if post:
                norm_row(y_at, post, eps, channels, y_at)
            cpu_rows.add_into(x_at, y_at, channels // 16)
            normed_at = address_of(normed) + 4 * row * channels
            norm_row(x_at, weight, eps, channels, normed_at)
            blocks = channels // 32
            round_blocks(normed_at, out, row * blocks, blocks)
        finish(team.counters, phase, last - first)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def turn_and_keep(
    team: Team,
    phase: int,
    qkv: Any,
    bias: int,
    norms: int,
    eps: float,
    cos: Any,
    sin: Any,
    heads: Heads,
    rows: Rows,
    k_cache: int,
    v_cache: int,
) -> None:
    """Bias, head norms and rotary turns of qkv [T, (H + 2 G) D] in place; keys and values into the caches."""
    items, wide = qkv.shape
    size, count = heads.size, portion(items, team)
    turning = (heads.shared + 1) * heads.groups
    while True:
        first = claim(team.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for token in range(first, last):
            here = address_of(qkv) + 4 * token * wide
            if bias:
                cpu_rows.add_into(here, bias, wide // 16)
            place = 2 * rows.positions[token] * size  # bytes: half a head of float32 for each position
            for head in range(turning):
                at = here + 4 * head * size
                if norms:
                    norm_row(at, norms + 4 * head * size, eps, size, at)
                cpu_rows.rotate(at, address_of(cos) + place, address_of(sin) + place, 2 * size, size // 32)
            slot = rows.writes[token]
            if slot >= 0:
                parts, to = heads.groups * size // 16, 2 * np.int64(slot) * heads.groups * size
                keys = here + 4 * heads.shared * heads.groups * size
                cpu_rows.to_bfloat16(keys, k_cache + to, parts)
                cpu_rows.to_bfloat16(here + 4 * turning * size, v_cache + to, parts)
        finish(team.counters, phase, last - first)
    wait(team.counters, phase, items)
