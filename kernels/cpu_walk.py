"""How attention takes a tile's lanes through a split's blocks of 64 positions: down the trie of their pages.

Each lane, a (token, head), goes through its own blocks in order by an online softmax. The lanes of a tile go together:
a block is read once for all that have it, then they part, the last first. So what a lane computes, and in which order,
does not depend on who shares its prefix. In the room a key head's lanes lie side by side, then the next one's.

Knows: tiles and their trie. Must not know: how a block is read (`cpu_blocks`), who computes which split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_flash, cpu_lanes, cpu_softmax
from plait.kernels.cpu_blocks import FLOATS, MATRICES, Source, fetch, read_floats, read_pairs, take
from plait.kernels.cpu_parts import Heads, Rounded, Rows, round_blocks
from plait.kernels.cpu_room import KEYS, Room, floats, integers, longs, slot_bytes
from plait.kernels.cpu_rows import address_of, to_bfloat16
from plait.kernels.cpu_share import SEGMENT, SPLIT_BLOCKS

LANES = cpu_flash.LANES
HAND_OUT, KEEP, JOIN = range(3)  # what becomes of a lane that has seen all of its split


class Caches(NamedTuple):
    """A layer's keys and values, in one piece of memory, the values behind the keys; and its window."""

    keys: int
    values: int
    window: int


class Bundle(NamedTuple):
    """A tile's segments, the lanes of one key head, room from one key head's to the next one's, and key heads."""

    begin_segment: int
    end_segment: int
    lanes: int
    padded: int
    group: int
    end_group: int


@numba.njit  # type: ignore[untyped-decorator]
def _segment(rows: Rows, segment: int) -> Any:
    """Its row, its first token there, and how many."""
    at = SEGMENT * segment
    return np.int64(rows.segments[at]), np.int64(rows.segments[at + 1]), np.int64(rows.segments[at + 2])


@numba.njit  # type: ignore[untyped-decorator]
def init_lanes(
    form: int, bundle: Bundle, qkv: Any, caches: Caches, heads: Heads, rows: Rows, anew: bool, here: Room
) -> None:
    """That each lane has seen nothing yet; where `anew`, also its query and what it may see."""
    size = heads.size
    for i in range(bundle.end_group - bundle.group):
        lane = i * bundle.padded
        references, sums = floats(here.references + 4 * lane, bundle.lanes), floats(here.sums + 4 * lane, bundle.lanes)
        references[:] = np.float32(cpu_softmax.NOTHING)
        sums[:] = np.float32(0.0)
        cpu_lanes.clear(here.totals + 4 * lane * size, bundle.lanes * size // 16)
        if anew:
            _begin_group(form, bundle, bundle.group + i, lane, qkv, caches.window, heads, rows, here)


@numba.njit  # type: ignore[untyped-decorator]
def _begin_group(
    form: int, bundle: Bundle, group: int, lane: int, qkv: Any, window: int, heads: Heads, rows: Rows, here: Room
) -> None:
    size, wide, first_lane = heads.size, qkv.shape[1], lane
    marks = integers(here.marks, here.capacity + 1)
    floors, limits = integers(here.floors, here.capacity), integers(here.limits, here.capacity)
    for segment in range(bundle.begin_segment, bundle.end_segment):
        marks[segment - bundle.begin_segment] = lane - first_lane
        row, first, count = _segment(rows, segment)
        q_start, q_end = rows.q_starts[row], rows.q_starts[row + 1]
        start = rows.kv_starts[row + 1] - rows.kv_starts[row] - (q_end - q_start) + first
        for i in range(count):
            query = address_of(qkv) + 4 * ((q_start + first + i) * wide + group * heads.shared * size)
            for _ in range(heads.shared):
                floors[lane], limits[lane] = max(0, start + i - window + 1), start + i + 1
                _keep_query(form, lane, query, here)
                query += 4 * size
                lane += 1
    marks[bundle.end_segment - bundle.begin_segment] = lane - first_lane
    if form != FLOATS and lane % LANES:
        cpu_flash.turn_queries(here.rows, size, here.queries + 4 * (lane // LANES * LANES), here.query_step)


@numba.njit  # type: ignore[untyped-decorator]
def first_block(bundle: Bundle, here: Room) -> Any:
    """The first block that any lane sees."""
    floors = integers(here.floors, here.capacity)
    lowest = np.int64(floors[0])
    for lane in range(1, bundle.lanes):
        lowest = min(lowest, np.int64(floors[lane]))
    return lowest // KEYS


@numba.njit  # type: ignore[untyped-decorator]
def _keep_query(form: int, lane: int, query: int, here: Room) -> None:
    """Float32 [D] as bfloat16; pairs of 16 lanes are turned together."""
    size = here.size
    if form == FLOATS:
        cpu_lanes.shorten(query, here.queries + 4 * lane * size, size // 16)
        return
    to_bfloat16(query, here.rows + 2 * (lane % LANES) * size, size // 16)
    if lane % LANES == LANES - 1:
        cpu_flash.turn_queries(here.rows, size, here.queries + 4 * (lane - LANES + 1), here.query_step)


@numba.njit  # type: ignore[untyped-decorator]
def walk(
    form: int,
    bundle: Bundle,
    begin_block: int,
    what: int,
    to: int,
    slot_lanes: int,
    caches: Caches,
    heads: Heads,
    rows: Rows,
    here: Room,
    out: Rounded,
) -> None:
    """The split from a block on, for all lanes. `to`: slots of so many lanes, one for each key head."""
    ranges, marks = longs(here.ranges, 3 * here.capacity), integers(here.marks, here.capacity + 1)
    ranges[0], ranges[1], ranges[2], depth = bundle.begin_segment, bundle.end_segment, begin_block, 1
    end_block = begin_block + SPLIT_BLOCKS
    while depth:
        depth -= 1
        first, last, block = ranges[3 * depth], ranges[3 * depth + 1], ranges[3 * depth + 2]
        until = _together(first, last, bundle, rows, here)
        _go_down(form, first, last, block, min(until, end_block), bundle, caches, heads, rows, here)
        if last == first + 1:
            mark = np.int64(marks[first - bundle.begin_segment])
            _let_go(form, first, mark, what, to, slot_lanes, bundle, heads, rows, here, out)
            continue
        at = first
        for segment in range(first + 1, last + 1):
            if segment == last or rows.segments[SEGMENT * segment + 3] <= until:
                ranges[3 * depth], ranges[3 * depth + 1], ranges[3 * depth + 2] = at, segment, max(block, until)
                at, depth = segment, depth + 1


@numba.njit  # type: ignore[untyped-decorator]
def _together(first: int, last: int, bundle: Bundle, rows: Rows, here: Room) -> Any:
    """The block at which the segments part, or end."""
    marks, limits = integers(here.marks, here.capacity + 1), integers(here.limits, here.capacity)
    until = np.int64(0)
    for segment in range(first, last):
        until = max(until, np.int64(limits[marks[segment + 1 - bundle.begin_segment] - 1] + KEYS - 1) // KEYS)
    for segment in range(first + 1, last):
        until = min(until, np.int64(rows.segments[SEGMENT * segment + 3]))
    return until


@numba.njit  # type: ignore[untyped-decorator]
def _go_down(
    form: int,
    first: int,
    last: int,
    block: int,
    until: int,
    bundle: Bundle,
    caches: Caches,
    heads: Heads,
    rows: Rows,
    here: Room,
) -> None:
    """All lanes of the segments through the blocks before `until`, which lie in the first one's pages."""
    marks = integers(here.marks, here.capacity + 1)
    floors, limits = integers(here.floors, here.capacity), integers(here.limits, here.capacity)
    lane, end = np.int64(marks[first - bundle.begin_segment]), np.int64(marks[last - bundle.begin_segment])
    floor, all_from, all_to, limit = floors[lane], floors[lane], limits[lane], limits[lane]
    for i in range(lane, end):
        floor, all_from = min(floor, floors[i]), max(all_from, floors[i])
        all_to, limit = min(all_to, limits[i]), max(limit, limits[i])
    row, _, _ = _segment(rows, first)
    pages = address_of(rows.pages) + 4 * np.int64(rows.first_pages[row])
    step, groups = 2 * heads.groups * heads.size, bundle.end_group - bundle.group
    scale = np.float32(heads.scale * cpu_softmax.LOG2_E)
    offset, at_first = 2 * bundle.group * heads.size, max(block, floor // KEYS)
    all_heads = Source(pages, rows.page_shift, step, caches.keys + offset, caches.values + offset)
    for at in range(at_first, until):
        base = at * KEYS
        count = min(KEYS, limit - base)
        partly = base < all_from or base + KEYS > all_to
        if form != MATRICES or at == at_first:
            fetch(form, base, count, groups * heads.size, all_heads)
        if form == MATRICES and at + 1 < until:  # so that it is on its way while this one is computed
            fetch(form, base + KEYS, min(KEYS, limit - base - KEYS), groups * heads.size, all_heads)
        for i in range(groups):
            offset = 2 * i * heads.size
            source = Source(pages, rows.page_shift, step, all_heads.keys + offset, all_heads.values + offset)
            keys = key_step = np.int64(0)
            if form == FLOATS:
                read_floats(base, count, source, here)
            else:
                keys, key_step = read_pairs(base, count, source, here)
            beside = i * bundle.padded
            take(form, beside + lane, beside + end, base, count, partly, keys, key_step, scale, here)


@numba.njit  # type: ignore[untyped-decorator]
def _let_go(
    form: int,
    segment: int,
    mark: int,
    what: int,
    to: int,
    slot_lanes: int,
    bundle: Bundle,
    heads: Heads,
    rows: Rows,
    here: Room,
    out: Rounded,
) -> None:
    """A segment's lanes, from `mark` on, whose room others may use now."""
    _, _, count = _segment(rows, segment)
    lanes, size = count * heads.shared, heads.size
    for i in range(bundle.end_group - bundle.group):
        lane = i * bundle.padded + mark
        totals, references, sums = here.totals + 4 * lane * size, here.references + 4 * lane, here.sums + 4 * lane
        if what == HAND_OUT:
            _hand_out(form, segment, bundle.group + i, totals, sums, heads, rows, out)
            continue
        slot = to + i * slot_bytes(slot_lanes, size)
        places = slot + 4 * mark * size, slot + 4 * slot_lanes * size + 4 * mark
        if what == KEEP:
            floats(places[0], lanes * size)[:] = floats(totals, lanes * size)
            floats(places[1], lanes)[:] = floats(references, lanes)
            floats(places[1] + 4 * slot_lanes, lanes)[:] = floats(sums, lanes)
        else:
            _join(lanes, size, totals, references, sums, places[0], places[1], places[1] + 4 * slot_lanes)


@numba.njit  # type: ignore[untyped-decorator]
def _join(
    lanes: int, size: int, totals: int, references: int, sums: int, to: int, to_references: int, to_sums: int
) -> None:
    for lane in range(lanes):
        total, place = totals + 4 * lane * size, to + 4 * lane * size
        cpu_softmax.merge_partial(
            total,
            references + 4 * lane,
            sums + 4 * lane,
            place,
            to_references + 4 * lane,
            to_sums + 4 * lane,
            size // 16,
        )


@numba.njit  # type: ignore[untyped-decorator]
def join_kept(bundle: Bundle, slots: int, to: int, slot_lanes: int, size: int) -> None:
    """What was kept of one split to what was kept of those before it."""
    for i in range(bundle.end_group - bundle.group):
        one, other = slots + i * slot_bytes(slot_lanes, size), to + i * slot_bytes(slot_lanes, size)
        behind = 4 * slot_lanes * size
        more = behind + 4 * slot_lanes
        _join(bundle.lanes, size, one, one + behind, one + more, other, other + behind, other + more)


@numba.njit  # type: ignore[untyped-decorator]
def hand_out_kept(
    form: int, bundle: Bundle, slots: int, slot_lanes: int, heads: Heads, rows: Rows, out: Rounded
) -> None:
    """All lanes' results from their slots."""
    for i in range(bundle.end_group - bundle.group):
        totals = slots + i * slot_bytes(slot_lanes, heads.size)
        sums = totals + 4 * slot_lanes * (heads.size + 1)
        for segment in range(bundle.begin_segment, bundle.end_segment):
            _hand_out(form, segment, bundle.group + i, totals, sums, heads, rows, out)
            _, _, count = _segment(rows, segment)
            totals, sums = totals + 4 * count * heads.shared * heads.size, sums + 4 * count * heads.shared


@numba.njit  # type: ignore[untyped-decorator]
def _hand_out(
    form: int, segment: int, group: int, totals: int, sums: int, heads: Heads, rows: Rows, out: Rounded
) -> None:
    """A segment's lanes of one key head, which lie at these addresses."""
    blocks, size, lane = out.scales.shape[1], heads.size, 0
    row, first, count = _segment(rows, segment)
    weights = floats(sums, count * heads.shared)
    for token in range(rows.q_starts[row] + first, rows.q_starts[row] + first + count):
        for head in range(group * heads.shared, (group + 1) * heads.shared):
            total = floats(totals + 4 * lane * size, size)
            inverse = np.float32(1.0) / weights[lane]
            for d in range(size):
                total[d] *= inverse
            if form != FLOATS:
                cpu_flash.sort_channels(totals + 4 * lane * size, size)
            round_blocks(totals + 4 * lane * size, out, token * blocks + head * size // 32, size // 32)
            lane += 1
