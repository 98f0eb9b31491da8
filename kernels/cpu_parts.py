"""The phases of a decoder's step on a CPU, products apart: each is a number of items that the step's threads share out.

A phase's items may be done in any order by anybody, and what an item computes for a token does not depend on the
other tokens: so a token has the same bits alone, in any batch, in any chunk of its prompt.

Knows: one phase at a time. Must not know: the order of phases, torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_rows
from plait.kernels.cpu_rows import address_of
from plait.kernels.cpu_team import claim, finish, wait

LANES = 96  # (token, head) pairs that share the reading of keys and values


class Team(NamedTuple):
    """Which thread this is, of how many, the counters they share, and this thread's scratch for AMX (0: none)."""

    me: int
    num_threads: int
    counters: int
    scratch: int


class Rounded(NamedTuple):
    """Activations [T, C] as products read them: 8 bits in blocks of 32, or, where `wide` has rows, bfloat16.

    `numbers` int8 [T, C], `scales` and `sums` float32 [T, C / 32]; `wide` uint16 [T, C] or [0, C], with room for
    multiples of 16 rows, which lie in the tiles that matrix registers hold: [T / 16, C / 32, 16, 32].
    """

    numbers: Any
    scales: Any
    sums: Any
    bf16_tiles: Any


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
    pieces: Any
    num_tiles: int
    page_shift: int  # a page holds 1 << page_shift tokens: division would cost more than reading a key


class Heads(NamedTuple):
    """`groups` key heads of `size` channels, `shared` query heads to each."""

    shared: int
    groups: int
    size: int
    scale: float


@numba.njit  # type: ignore[untyped-decorator]
def portion(items: int, team: Team) -> int:
    """How many items to claim at once."""
    return max(1, items // (4 * team.num_threads))


@numba.njit  # type: ignore[untyped-decorator]
def round_blocks(x: int, out: Rounded, first: int, count: int) -> None:
    """32 * count float32 at x into `out`, whose blocks are counted through all rows, from block `first` on."""
    if len(out.wide):
        blocks = out.scales.shape[1]
        row, block = first // blocks, first % blocks  # not for each: division takes longer than the rest of it
        for i in range(count):
            cpu_rows.to_bfloat16(x + 128 * i, wide_block(out, row, block), 2)
            block += 1
            if block == blocks:
                row, block = row + 1, 0
        return
    for place in range(first, first + count):
        cpu_rows.round_block(
            x + 128 * (place - first),
            address_of(out.numbers) + 32 * place,
            address_of(out.scales) + 4 * place,
            address_of(out.sums) + 4 * place,
        )


@numba.njit  # type: ignore[untyped-decorator]
def wide_block(x: Rounded, row: int, block: int) -> Any:
    """Where a row's block of `wide` lies; those of a tile's further rows follow it."""
    return address_of(x.wide) + 64 * (16 * ((row >> 4) * x.scales.shape[1] + block) + (row & 15))


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
