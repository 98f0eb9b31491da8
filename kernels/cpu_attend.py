"""Paged attention as a phase of a CPU's step: bfloat16 caches in, 8-bit activations out.

Keys and values are read in blocks of 64 positions counted from the sequence's start, once for all the tokens of a
tile and all the query heads of a group; each (token, head) goes through them in that order by an online softmax.

Knows: pages and tiles. Must not know: projections, the order of phases.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels import cpu_amx, cpu_lanes
from plait.kernels.cpu_parts import KEYS, Heads, Room, Rounded, Rows, Team, round_blocks
from plait.kernels.cpu_rows import address_of, to_bfloat16
from plait.kernels.cpu_team import claim, finish, wait

FEW = 8  # lanes for which AMX does not pay


@numba.njit  # type: ignore[untyped-decorator]
def attend(
    team: Team,
    phase: int,
    qkv: Any,
    k_cache: int,
    v_cache: int,
    heads: Heads,
    window: int,
    rows: Rows,
    room: Room,
    out: Rounded,
    tokens: int,
) -> None:
    """Attention of the turned queries in qkv [T, (H + 2 G) D] over each row's pages, to out [T, H * D].

    A tile holds up to `tokens` tokens of one row.
    """
    items = len(rows.tile_rows) * heads.groups
    while True:
        item = claim(team.counters, phase, 1)
        if item >= items:
            break
        _attend_tile(
            team.scratch,
            item // heads.groups,
            item % heads.groups,
            qkv,
            k_cache,
            v_cache,
            heads,
            window,
            rows,
            room,
            out,
            tokens,
        )
        finish(team.counters, phase, 1)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def _attend_tile(
    scratch: int,
    tile: int,
    group: int,
    qkv: Any,
    k_cache: int,
    v_cache: int,
    heads: Heads,
    window: int,
    rows: Rows,
    room: Room,
    out: Rounded,
    tokens: int,
) -> None:
    row, first = rows.tile_rows[tile], rows.tile_firsts[tile]
    q_first, size = rows.q_starts[row] + first, heads.size
    q_len = rows.q_starts[row + 1] - rows.q_starts[row]
    kv_len = rows.kv_starts[row + 1] - rows.kv_starts[row]
    count = min(tokens, q_len - first)
    start = kv_len - q_len + first  # position of the tile's first token
    lanes = count * heads.shared
    if lanes < FEW:
        scratch = 0
    for lane in range(lanes):
        head = group * heads.shared + lane % heads.shared
        for d in range(size):
            room.queries[lane, d] = qkv[q_first + lane // heads.shared, head * size + d]
            room.totals[lane, d] = np.float32(0.0)
        room.peaks[lane] = np.float32(cpu_lanes.LOWEST)
        room.weights[lane] = np.float32(0.0)
        query = address_of(room.queries) + 4 * lane * size
        if scratch:
            to_bfloat16(query, scratch + cpu_amx.QUERIES_AT + 2 * lane * size, size // 16)
        else:
            cpu_lanes.shorten(query, size // 16)
    end, lowest = start + count, max(0, start - window + 1)
    first_block, last_block = lowest // KEYS, (end - 1) // KEYS
    _find_block(row, first_block, end, group, k_cache, v_cache, heads, rows, room)
    for block in range(first_block, last_block + 1):
        base = block * KEYS
        here = min(KEYS, end - base)
        _read_block(scratch, block, here, heads, room)
        if block < last_block:  # so that it is on its way while this one is computed
            _find_block(row, block + 1, end, group, k_cache, v_cache, heads, rows, room)
        lane = 0
        while lane < lanes:
            if scratch:
                lane += _take_sixteen(scratch, lane, lanes, base, here, start, window, heads, room)
            else:
                lane += _take_lanes(lane, lanes, base, here, start, window, heads, room)
    _hand_out(q_first, group, lanes, heads, room, out)


@numba.njit  # type: ignore[untyped-decorator]
def _find_block(
    row: int, block: int, end: int, group: int, k_cache: int, v_cache: int, heads: Heads, rows: Rows, room: Room
) -> None:
    """Where the block's keys and values lie; keys beyond `end` are the last again, up to a multiple of 16."""
    size, base, pair = heads.size, block * KEYS, 2 * (block % 2)
    here = min(KEYS, end - base)
    first_page, shift = rows.first_pages[row], rows.page_shift
    within = (1 << shift) - 1
    for j in range((here + 15) // 16 * 16):
        at = base + min(j, here - 1)
        slot = (np.int64(rows.pages[first_page + (at >> shift)]) << shift) + (at & within)
        offset = 2 * (slot * heads.groups + group) * size
        room.places[pair, j] = k_cache + offset
        room.places[pair + 1, j] = v_cache + offset
        for line in range(0, 2 * size, 64):
            cpu_lanes.fetch(k_cache + offset + line)
            cpu_lanes.fetch(v_cache + offset + line)


@numba.njit  # type: ignore[untyped-decorator]
def _read_block(scratch: int, block: int, here: int, heads: Heads, room: Room) -> None:
    """The block's keys, turned, and its values, as float32; with `scratch` in pairs of bfloat16."""
    size, pair = heads.size, 2 * (block % 2)
    if scratch:
        _read_pairs(scratch, pair, here, size, room)
        return
    for j in range(0, here, 16):
        for channel in range(0, size, 32):
            to = address_of(room.keys) + 4 * (channel * KEYS + j)
            cpu_lanes.turn_keys(0, address_of(room.places) + 8 * (KEYS * pair + j), 2 * channel, to)
    values = address_of(room.values)
    for j in range(here):
        cpu_lanes.widen(room.places[pair + 1, j], values + 4 * j * size, size // 16)
    if here % 2:
        cpu_lanes.clear(values + 4 * here * size, size // 16)


@numba.njit  # type: ignore[untyped-decorator]
def _read_pairs(scratch: int, pair: int, here: int, size: int, room: Room) -> None:
    for j in range(0, here, 16):
        for channel in range(0, size, 32):
            to = address_of(room.keys) + 2 * channel * KEYS + 4 * j
            cpu_lanes.turn_keys(1, address_of(room.places) + 8 * (KEYS * pair + j), 2 * channel, to)
    nothing = scratch + cpu_amx.ZEROS_AT
    for j in range(0, (here + 31) // 32 * 32, 2):
        first = room.places[pair + 1, j] if j < here else nothing
        second = room.places[pair + 1, j + 1] if j + 1 < here else nothing
        cpu_amx.pair_values(first, second, address_of(room.values) + 2 * j * size, size // 16)


@numba.njit  # type: ignore[untyped-decorator]
def _take_sixteen(
    scratch: int,
    lane: int,
    lanes: int,
    base: int,
    here: int,
    start: int,
    window: int,
    heads: Heads,
    room: Room,
) -> int:
    """`_take_lanes` for up to 16 lanes, in bfloat16. What lies beyond `lanes` is computed and never read."""
    count, size = min(16, lanes - lane), heads.size
    scores, weights = scratch + cpu_amx.SCORES_AT, scratch + cpu_amx.WEIGHTS_AT
    totals = address_of(room.totals) + 4 * lane * size
    cpu_amx.score(scratch + cpu_amx.QUERIES_AT + 2 * lane * size, size, address_of(room.keys), scores)
    _soften(lane, count, scores, base, start, window, heads, room)
    for i in range(count):
        to_bfloat16(scores + cpu_lanes.ROW * i, weights + cpu_lanes.ROW // 2 * i, KEYS // 16)
    cpu_amx.gather(weights, address_of(room.values), size, (here + 31) // 32, totals)
    return count


@numba.njit  # type: ignore[untyped-decorator]
def _take_lanes(lane: int, lanes: int, base: int, here: int, start: int, window: int, heads: Heads, room: Room) -> int:
    """Scores, weights and sums of up to 3 lanes from `lane` on over the block; returns how many."""
    count, size = min(3, lanes - lane), heads.size
    scores, keys = address_of(room.scores), address_of(room.keys)
    queries, totals = address_of(room.queries) + 4 * lane * size, address_of(room.totals) + 4 * lane * size
    if count == 3:
        cpu_lanes.score(3, queries, keys, size, scores)
    elif count == 2:
        cpu_lanes.score(2, queries, keys, size, scores)
    else:
        cpu_lanes.score(1, queries, keys, size, scores)
    _soften(lane, count, scores, base, start, window, heads, room)
    cpu_lanes.shorten(scores, 4 * count)
    for first in range(0, here, 2 * cpu_lanes.PAIRS):
        pairs = min(cpu_lanes.PAIRS, (here - first + 1) // 2)
        values = address_of(room.values) + 4 * first * size
        for channel in range(0, 4 * size, 128):
            if count == 3:
                cpu_lanes.gather(3, scores + 4 * first, values + channel, size, pairs, totals + channel)
            elif count == 2:
                cpu_lanes.gather(2, scores + 4 * first, values + channel, size, pairs, totals + channel)
            else:
                cpu_lanes.gather(1, scores + 4 * first, values + channel, size, pairs, totals + channel)
    return count


@numba.njit  # type: ignore[untyped-decorator]
def _soften(lane: int, count: int, scores: int, base: int, start: int, window: int, heads: Heads, room: Room) -> None:
    """Scores [count, 64] of the lanes from `lane` on become weights."""
    for i in range(count):
        position = start + (lane + i) // heads.shared
        cpu_lanes.soften(
            scores + cpu_lanes.ROW * i,
            max(0, position - window + 1 - base),
            max(0, min(KEYS, position + 1 - base)),
            np.float32(heads.scale),
            address_of(room.peaks) + 4 * (lane + i),
            address_of(room.weights) + 4 * (lane + i),
            address_of(room.totals) + 4 * (lane + i) * heads.size,
            heads.size // 16,
        )


@numba.njit  # type: ignore[untyped-decorator]
def _hand_out(q_first: int, group: int, lanes: int, heads: Heads, room: Room, out: Rounded) -> None:
    blocks, size = out.scales.shape[1], heads.size
    for lane in range(lanes):
        inverse = np.float32(1.0) / room.weights[lane]
        for d in range(size):
            room.totals[lane, d] *= inverse
        token, head = q_first + lane // heads.shared, group * heads.shared + lane % heads.shared
        place = token * blocks + head * size // 32
        round_blocks(address_of(room.totals) + 4 * lane * size, out, place, size // 32)
