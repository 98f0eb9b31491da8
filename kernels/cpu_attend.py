"""Paged attention as a phase of a CPU's step: bfloat16 caches in, 8-bit activations out.

Keys and values are read in blocks of 64 positions counted from the sequence's start; each (token, head), a lane, goes
through its own in that order by an online softmax. The lanes of a tile go down the trie of their pages together: a
block is read once for all that have it, then the lanes part, the last first. So what a lane computes, and in which
order, does not depend on who shares its prefix: its bits are the same alone.

Knows: pages and tiles. Must not know: projections, the order of phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_amx, cpu_flash, cpu_lanes, cpu_softmax
from plait.kernels.cpu_parts import Heads, Rounded, Rows, Team, round_blocks
from plait.kernels.cpu_room import KEYS, Room, floats, integers, longs, room
from plait.kernels.cpu_rows import address_of, to_bfloat16
from plait.kernels.cpu_share import SEGMENT
from plait.kernels.cpu_team import claim, finish, wait

LANES = cpu_flash.LANES
MANY = 4  # tiles to a thread


class Source(NamedTuple):
    """Where a row's keys and values lie: addresses of its page table and, for one key head, of the caches."""

    pages: int
    shift: int  # a page holds 1 << shift positions
    step: int  # bytes from one slot to the next
    keys: int
    values: int


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
    if rows.num_tiles >= MANY * team.size:  # one thread for all groups: what is fetched ahead serves them all
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
            keys, step = _read_pairs(base, count, source, here)
        else:
            _read_floats(base, count, source, here)
        if at + 1 < until:  # so that it is on its way while this one is computed
            _fetch(base + KEYS, min(KEYS, limit - base - KEYS), source, here)
        if amx and few:
            _take_few(lane, end, base, count, partly, keys, step, scale, here)
        elif amx:
            _take_sixteens(lane, end, base, count, partly, keys, step, scale, here)
        else:
            _take_threes(lane, end, base, count, scale, here)


@numba.njit  # type: ignore[untyped-decorator]
def _offset(position: int, source: Source) -> Any:
    """Where a position's keys and values lie, in bytes."""
    page = np.int64(integers(source.pages, 1 << 30)[position >> source.shift])
    return ((page << source.shift) + (position & ((1 << source.shift) - 1))) * source.step


@numba.njit  # type: ignore[untyped-decorator]
def _fetch(base: int, count: int, source: Source, here: Room) -> None:
    """Asks for a block's keys and values, as one run of slots if its ends look like one."""
    offset, run = _offset(base, source), np.int64(count)
    if _offset(base + count - 1, source) != offset + (count - 1) * source.step:
        run = np.int64(1)
    for j in range(0, count, run):
        offset = _offset(base + j, source)
        cpu_lanes.fetch(source.keys + offset, source.step, run, here.size)
        cpu_lanes.fetch(source.values + offset, source.step, run, here.size)


@numba.njit  # type: ignore[untyped-decorator]
def _read_floats(base: int, count: int, source: Source, here: Room) -> None:
    """The block's keys, turned, and its values, as float32."""
    size, places = here.size, longs(here.places, KEYS)
    for j in range((count + 15) // 16 * 16):  # keys beyond `count` are the last again
        offset = _offset(base + min(j, count - 1), source)
        places[j] = source.keys + offset
        if j < count:
            cpu_lanes.widen(source.values + offset, here.values + 4 * j * size, size // 16)
    for j in range(0, count, 16):
        for channel in range(0, size, 32):
            cpu_lanes.turn_keys(here.places + 8 * j, 2 * channel, here.keys + 4 * (channel * KEYS + j))
    if count % 2:
        cpu_lanes.clear(here.values + 4 * count * size, size // 16)


@numba.njit  # type: ignore[untyped-decorator]
def _is_run(base: int, count: int, source: Source, here: Room) -> Any:
    """Whether the block's slots follow each other, with as many behind them as fill its last chunk."""
    if source.shift:
        return False
    pages, first = integers(source.pages, 1 << 30), base + count // 32 * 32
    if first > base and not cpu_flash.are_neighbours(source.pages + 4 * base, count // 32):
        return False
    for position in range(first, base + count):
        if pages[position] != pages[base] + position - base:
            return False
    return source.keys + _offset(base, source) + (count + 31) // 32 * 32 * source.step <= source.values


@numba.njit  # type: ignore[untyped-decorator]
def _read_pairs(base: int, count: int, source: Source, here: Room) -> Any:
    """The block's values in pairs; where its keys lie, and how far apart: in the cache, if that is one run of slots.

    Keys behind the last may be anything, values are zero.
    """
    size, pairs = here.size, count // 2
    keys: Any = here.keys
    step: Any = np.int64(2 * size)
    if _is_run(base, count, source, here):
        offset = _offset(base, source)
        keys, step = source.keys + offset, source.step
        if pairs:
            cpu_flash.pair_values(source.values + offset, step, size, pairs, here.values)
    else:
        for j in range(count):
            offset = _offset(base + j, source)
            cpu_flash.copy(source.keys + offset, keys + j * step, size // 32)
            cpu_flash.copy(source.values + offset, here.copies + j * step, size // 32)
        if pairs:
            cpu_flash.pair_values(here.copies, step, size, pairs, here.values)
    if count % 2:
        cpu_flash.copy(source.values + _offset(base + count - 1, source), here.copies, size // 32)
        cpu_lanes.clear(here.copies + 2 * size, size // 32)
        cpu_flash.pair_values(here.copies, np.int64(2 * size), size, 1, here.values + 4 * pairs * size)
        pairs += 1
    left = (count + 31) // 32 * 16 - pairs
    if left:
        cpu_lanes.clear(here.values + 4 * pairs * size, left * size // 16)
    return keys, step


@numba.njit  # type: ignore[untyped-decorator]
def _take_few(
    lane: int, end: int, base: int, count: int, partly: bool, keys: int, step: int, scale: float, here: Room
) -> None:
    """`_take_sixteens` for up to 4 lanes."""
    size, chunks, scores, totals = here.size, (count + 31) // 32, here.scores, here.totals + 4 * lane * here.size
    cpu_flash.score_few(here.queries + 4 * lane, here.query_step, size, keys, step, chunks, scores)
    if partly:
        cpu_softmax.hide_few(scores, base, here.floors + 4 * lane, here.limits + 4 * lane)
    references, sums = here.references + 4 * lane, here.sums + 4 * lane
    cpu_softmax.soften_few(scores, chunks, scale, references, sums, totals, size // 16, end - lane, here.weights)
    cpu_flash.gather_few(here.weights, here.values, size, chunks, totals)


@numba.njit  # type: ignore[untyped-decorator]
def _take_sixteens(
    first: int, last: int, base: int, count: int, partly: bool, keys: int, step: int, scale: float, here: Room
) -> None:
    """All lanes over the block. What lies behind the last is computed, too; those lanes are done or no lanes at all."""
    size, chunks = here.size, (count + 31) // 32
    scores, others = here.scores, here.scores + 4 * KEYS * LANES
    cpu_flash.score(here.queries + 4 * first, here.query_step, size, keys, step, chunks, scores)
    for lane in range(first, last, LANES):
        if lane + LANES < last:  # the matrix unit computes the next scores while the vectors do this softmax
            query = here.queries + 4 * (lane + LANES)
            cpu_flash.score(query, here.query_step, size, keys, step, chunks, others)
        if partly:
            cpu_softmax.hide(scores, base, here.floors + 4 * lane, here.limits + 4 * lane)
        totals = here.totals + 4 * lane * size
        cpu_softmax.soften_sixteen(
            scores,
            chunks,
            scale,
            here.references + 4 * lane,
            here.sums + 4 * lane,
            totals,
            size // 16,
            min(LANES, last - lane),
            here.weights,
        )
        cpu_flash.gather(here.weights, here.values, size, chunks, totals)
        scores, others = others, scores


@numba.njit  # type: ignore[untyped-decorator]
def _take_threes(first: int, last: int, base: int, count: int, scale: float, here: Room) -> None:
    """All lanes over the block, without AMX."""
    lane = first
    while lane < last:
        if last - lane >= 3:
            _take_lanes(3, lane, base, count, scale, here)
            lane += 3
        elif last - lane == 2:
            _take_lanes(2, lane, base, count, scale, here)
            lane += 2
        else:
            _take_lanes(1, lane, base, count, scale, here)
            lane += 1


@numba.njit  # type: ignore[untyped-decorator]
def _take_lanes(lanes: int, lane: int, base: int, count: int, scale: float, here: Room) -> None:
    size = here.size
    queries, totals = here.queries + 4 * lane * size, here.totals + 4 * lane * size
    floors, limits = integers(here.floors, here.lanes), integers(here.limits, here.lanes)
    if lanes == 3:
        cpu_lanes.score(3, queries, here.keys, size, here.scores)
    elif lanes == 2:
        cpu_lanes.score(2, queries, here.keys, size, here.scores)
    else:
        cpu_lanes.score(1, queries, here.keys, size, here.scores)
    for i in range(lanes):
        cpu_softmax.soften(
            here.scores + cpu_lanes.ROW * i,
            max(np.int64(0), floors[lane + i] - base),
            max(np.int64(0), min(np.int64(KEYS), limits[lane + i] - base)),
            scale,
            here.references + 4 * (lane + i),
            here.sums + 4 * (lane + i),
            totals + 4 * i * size,
            size // 16,
        )
    for first in range(0, count, 2 * cpu_lanes.PAIRS):
        pairs = min(cpu_lanes.PAIRS, (count - first + 1) // 2)
        values = here.values + 4 * first * size
        for channel in range(0, 4 * size, 128):
            if lanes == 3:
                cpu_lanes.gather(3, here.scores + 4 * first, values + channel, size, pairs, totals + channel)
            elif lanes == 2:
                cpu_lanes.gather(2, here.scores + 4 * first, values + channel, size, pairs, totals + channel)
            else:
                cpu_lanes.gather(1, here.scores + 4 * first, values + channel, size, pairs, totals + channel)


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
