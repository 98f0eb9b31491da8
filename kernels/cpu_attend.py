"""Paged attention as a phase of a CPU's step: bfloat16 caches in, 8-bit activations out.

Keys and values are read in blocks of 64 positions counted from the sequence's start; each (token, head), a lane, goes
through its own in that order by an online softmax. The lanes of a tile go down the trie of their pages together: a
block is read once for all that have it, then the lanes part, the last first. So what a lane computes, and in which
order, does not depend on who shares its prefix: its bits are the same alone.

Knows: tiles and their trie. Must not know: how a block is read (`cpu_blocks`), projections, the order of phases.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from plait.kernels import cpu_amx, cpu_flash, cpu_lanes, cpu_softmax
from plait.kernels.cpu_blocks import Source, fetch, read_floats, read_pairs, take_few, take_sixteens, take_threes
from plait.kernels.cpu_parts import Heads, Rounded, Rows, Team, round_blocks
from plait.kernels.cpu_room import KEYS, Room, floats, integers, longs, room
from plait.kernels.cpu_rows import address_of, to_bfloat16
from plait.kernels.cpu_share import SEGMENT
from plait.kernels.cpu_team import claim, finish, wait

LANES = cpu_flash.LANES
TILES_TO_A_THREAD = 4  # from which on a thread takes all groups of a tile


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
    memory: int,
    lanes: int,
    out: Rounded,
) -> None:
    """Attention of the turned queries in qkv [T, (H + 2 G) D] over each row's pages, to out [T, H * D].

    Keys and values lie in one piece of memory, the values behind the keys.

    `memory`: this thread's room for tiles of at most so many lanes.
    """
    items, count = rows.num_tiles * heads.groups, 1
    if rows.num_tiles >= TILES_TO_A_THREAD * team.size:  # what is fetched ahead serves all its groups
        count = heads.groups
    here = room(memory, lanes, heads.size)
    if team.scratch:
        cpu_amx.begin(here.shapes)
    while True:
        first = claim(team.counters, phase, count)
        if first >= items:
            break
        for item in range(first, first + count):
            tile, group = item // heads.groups, item % heads.groups
            _attend_tile(team.scratch, tile, group, qkv, k_cache, v_cache, heads, window, rows, here, out)
        finish(team.counters, phase, count)
    if team.scratch:
        cpu_amx.begin(team.scratch)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def _attend_tile(
    amx: int,
    tile: int,
    group: int,
    qkv: Any,
    k_cache: int,
    v_cache: int,
    heads: Heads,
    window: int,
    rows: Rows,
    here: Room,
    out: Rounded,
) -> None:
    begin, end = rows.tiles[tile], rows.tiles[tile + 1]
    offset = 2 * group * heads.size  # bytes, in the cache
    _begin(amx, begin, end, group, qkv, heads, window, rows, here)
    ranges, marks = longs(here.ranges, 3 * here.lanes), integers(here.marks, here.lanes + 1)
    ranges[0], ranges[1], ranges[2], depth = begin, end, 0, 1
    while depth:
        depth -= 1
        first, last, block = ranges[3 * depth], ranges[3 * depth + 1], ranges[3 * depth + 2]
        until = _together(first, last, begin, rows, here)
        _go_down(amx, first, last, begin, block, until, k_cache + offset, v_cache + offset, heads, rows, here)
        if last == first + 1:
            _hand_out(amx, first, marks[first - begin], group, heads, rows, here, out)
            continue
        at = first
        for segment in range(first + 1, last + 1):
            if segment == last or rows.segments[SEGMENT * segment + 3] <= until:
                ranges[3 * depth], ranges[3 * depth + 1], ranges[3 * depth + 2] = at, segment, until
                at, depth = segment, depth + 1


@numba.njit  # type: ignore[untyped-decorator]
def _segment(rows: Rows, segment: int) -> Any:
    """Its row, its first token there, and how many."""
    at = SEGMENT * segment
    return np.int64(rows.segments[at]), np.int64(rows.segments[at + 1]), np.int64(rows.segments[at + 2])


@numba.njit  # type: ignore[untyped-decorator]
def _begin(
    amx: int, begin: int, end: int, group: int, qkv: Any, heads: Heads, window: int, rows: Rows, here: Room
) -> None:
    """Each lane's query, what it may see, and that it has seen nothing yet."""
    size, wide, lane = heads.size, qkv.shape[1], 0
    marks = integers(here.marks, here.lanes + 1)
    floors, limits = integers(here.floors, here.lanes), integers(here.limits, here.lanes)
    references, sums = floats(here.references, here.lanes), floats(here.sums, here.lanes)
    for segment in range(begin, end):
        marks[segment - begin] = lane
        row, first, count = _segment(rows, segment)
        q_start, q_end = rows.q_starts[row], rows.q_starts[row + 1]
        start = rows.kv_starts[row + 1] - rows.kv_starts[row] - (q_end - q_start) + first
        for i in range(count):
            query = address_of(qkv) + 4 * ((q_start + first + i) * wide + group * heads.shared * size)
            for _ in range(heads.shared):
                floors[lane], limits[lane] = max(0, start + i - window + 1), start + i + 1
                references[lane], sums[lane] = np.float32(cpu_softmax.NOTHING), np.float32(0.0)
                cpu_lanes.clear(here.totals + 4 * lane * size, size // 16)
                _keep_query(amx, lane, query, here)
                query += 4 * size
                lane += 1
    marks[end - begin] = lane
    if amx and lane % LANES:
        cpu_flash.turn_queries(here.rows, size, here.queries + 4 * (lane // LANES * LANES), here.query_step)


@numba.njit  # type: ignore[untyped-decorator]
def _keep_query(amx: int, lane: int, query: int, here: Room) -> None:
    """Float32 [D] as bfloat16; AMX's are turned when there are 16."""
    size = here.size
    if not amx:
        cpu_lanes.shorten(query, here.queries + 4 * lane * size, size // 16)
        return
    to_bfloat16(query, here.rows + 2 * (lane % LANES) * size, size // 16)
    if lane % LANES == LANES - 1:
        cpu_flash.turn_queries(here.rows, size, here.queries + 4 * (lane - LANES + 1), here.query_step)


@numba.njit  # type: ignore[untyped-decorator]
def _together(first: int, last: int, begin: int, rows: Rows, here: Room) -> Any:
    """The block at which the segments part, or end."""
    marks, limits = integers(here.marks, here.lanes + 1), integers(here.limits, here.lanes)
    until = np.int64(0)
    for segment in range(first, last):
        until = max(until, np.int64(limits[marks[segment + 1 - begin] - 1] + KEYS - 1) // KEYS)
    for segment in range(first + 1, last):
        until = min(until, np.int64(rows.segments[SEGMENT * segment + 3]))
    return until


@numba.njit  # type: ignore[untyped-decorator]
def _go_down(
    amx: int,
    first: int,
    last: int,
    begin: int,
    block: int,
    until: int,
    k_cache: int,
    v_cache: int,
    heads: Heads,
    rows: Rows,
    here: Room,
) -> None:
    """All lanes of the segments through the blocks before `until`, which lie in the first one's pages."""
    marks = integers(here.marks, here.lanes + 1)
    floors, limits = integers(here.floors, here.lanes), integers(here.limits, here.lanes)
    lane, end = np.int64(marks[first - begin]), np.int64(marks[last - begin])
    row, _, _ = _segment(rows, first)
    floor, all_from, all_to, limit = floors[lane], floors[lane], limits[lane], limits[lane]
    for i in range(lane, end):
        floor, all_from = min(floor, floors[i]), max(all_from, floors[i])
        all_to, limit = min(all_to, limits[i]), max(limit, limits[i])
    pages = address_of(rows.pages) + 4 * np.int64(rows.first_pages[row])
    source = Source(pages, rows.page_shift, 2 * heads.groups * heads.size, k_cache, v_cache)
    few, scale = end - lane <= cpu_softmax.FEW, np.float32(heads.scale * cpu_softmax.LOG2_E)
    for at in range(max(block, floor // KEYS), until):
        base = at * KEYS
        count = min(KEYS, limit - base)
        partly = base < all_from or base + KEYS > all_to
        keys = step = np.int64(0)
        if amx:
            keys, step = read_pairs(base, count, source, here)
        else:
            read_floats(base, count, source, here)
        if at + 1 < until:  # so that it is on its way while this one is computed
            fetch(base + KEYS, min(KEYS, limit - base - KEYS), source, here)
        if amx and few:
            take_few(lane, end, base, count, partly, keys, step, scale, here)
        elif amx:
            take_sixteens(lane, end, base, count, partly, keys, step, scale, here)
        else:
            take_threes(lane, end, base, count, scale, here)


@numba.njit  # type: ignore[untyped-decorator]
def _hand_out(
    amx: int, segment: int, lane: int, group: int, heads: Heads, rows: Rows, here: Room, out: Rounded
) -> None:
    blocks, size = out.scales.shape[1], heads.size
    row, first, count = _segment(rows, segment)
    sums = floats(here.sums, here.lanes)
    for token in range(rows.q_starts[row] + first, rows.q_starts[row] + first + count):
        for head in range(group * heads.shared, (group + 1) * heads.shared):
            totals = floats(here.totals + 4 * lane * size, size)
            inverse = np.float32(1.0) / sums[lane]
            for d in range(size):
                totals[d] *= inverse
            if amx:
                cpu_flash.sort_channels(here.totals + 4 * lane * size, size)
            round_blocks(here.totals + 4 * lane * size, out, token * blocks + head * size // 32, size // 32)
            lane += 1
