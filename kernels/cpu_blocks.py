"""One block of 64 cached positions in attention: read from a row's pages, then all lanes of a tile over it.

Where the CPU multiplies bfloat16 keys stay where they lie if pages hold one token and follow each other, and values are
paired; elsewhere both become float32. A lane's bits are its own either way (`cpu_flash`, `cpu_dots`, `cpu_lanes`).

Knows: pages, a thread's room. Must not know: which lanes see which block, rows, phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_dots, cpu_flash, cpu_lanes, cpu_softmax
from plait.kernels.cpu_ir import HAVE_BFLOAT16
from plait.kernels.cpu_room import KEYS, Room, integers, longs

LANES, FEW = cpu_flash.LANES, cpu_softmax.FEW
FLOATS, VECTORS, MATRICES = range(3)  # how products are computed: `cpu_lanes`, `cpu_dots`, `cpu_flash`
WITHOUT_AMX = VECTORS if HAVE_BFLOAT16 else FLOATS


class Source(NamedTuple):
    """Where a row's keys and values lie: addresses of its page table and, for one key head, of the caches."""

    pages: int
    shift: int  # a page holds 1 << shift positions
    step: int  # bytes from one slot to the next
    keys: int
    values: int


@numba.njit  # type: ignore[untyped-decorator]
def _offset(position: int, source: Source) -> Any:
    """Where a position's keys and values lie, in bytes."""
    page = np.int64(integers(source.pages, 1 << 30)[position >> source.shift])
    return ((page << source.shift) + (position & ((1 << source.shift) - 1))) * source.step


@numba.njit  # type: ignore[untyped-decorator]
def fetch(form: int, base: int, count: int, width: int, source: Source) -> None:
    """Brings a block's keys and values near, `width` channels of each: of key heads that lie side by side.

    As one run of slots if its ends look like one.
    """
    offset, run = _offset(base, source), np.int64(count)
    if _offset(base + count - 1, source) != offset + (count - 1) * source.step:
        run = np.int64(1)
    for cache in (source.keys, source.values):
        for j in range(0, count, run):
            place = cache + _offset(base + j, source)
            if form == MATRICES:
                cpu_lanes.prefetch_rows(place, source.step, run, width)
            else:
                cpu_lanes.touch(place, source.step, run, width)


@numba.njit  # type: ignore[untyped-decorator]
def read_floats(base: int, count: int, source: Source, here: Room) -> None:
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
def read_pairs(base: int, count: int, source: Source, here: Room) -> Any:
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
def take(
    form: int, lane: int, end: int, base: int, count: int, partly: bool, keys: int, step: int, scale: float, here: Room
) -> None:
    """Lanes over a block that was read: `keys` and `step` as `read_pairs` gave them; `partly` if not all see all of it.

    What lies behind the last lane may be computed, too: those lanes are done, or no lanes at all.
    """
    if form == FLOATS:
        _take_threes(lane, end, base, count, scale, here)
    elif form == VECTORS:
        _take_vectors(lane, end, base, count, partly, keys, step, scale, here)
    elif end - lane <= FEW:
        _take_few(form, lane, end, base, count, partly, keys, step, scale, here)
    else:
        _take_sixteens(lane, end, base, count, partly, keys, step, scale, here)


@numba.njit  # type: ignore[untyped-decorator]
def _take_few(
    form: int, lane: int, end: int, base: int, count: int, partly: bool, keys: int, step: int, scale: float, here: Room
) -> None:
    """Up to 4 lanes."""
    size, chunks, scores, totals = here.size, (count + 31) // 32, here.scores, here.totals + 4 * lane * here.size
    if form == MATRICES:
        cpu_flash.score_few(here.queries + 4 * lane, here.query_step, size, keys, step, chunks, scores)
    else:
        cpu_dots.turn_few(here.queries + 4 * lane, here.query_step, size, here.rows)
        cpu_dots.score_few(here.rows, size, keys, step, chunks, scores)
    if partly:
        cpu_softmax.hide_few(scores, base, here.floors + 4 * lane, here.limits + 4 * lane)
    references, sums = here.references + 4 * lane, here.sums + 4 * lane
    cpu_softmax.soften_few(scores, chunks, scale, references, sums, totals, size // 16, end - lane, here.weights)
    if form == MATRICES:
        cpu_flash.gather_few(here.weights, here.values, size, chunks, totals)
    else:
        cpu_dots.gather_few(here.weights, here.values, size, chunks, totals)


@numba.njit  # type: ignore[untyped-decorator]
def _take_vectors(
    first: int, last: int, base: int, count: int, partly: bool, keys: int, step: int, scale: float, here: Room
) -> None:
    """In vectors: 16 lanes at a time, 4 where that is quicker."""
    lane = first
    while last - lane > LANES - FEW:
        query = here.queries + 4 * lane
        cpu_dots.score(query, here.query_step, here.size, keys, step, (count + 31) // 32, here.scores)
        totals = _soften(here.scores, lane, last, base, count, partly, scale, here)
        cpu_dots.gather(here.weights, here.values, here.size, (count + 31) // 32, totals)
        lane += LANES
    while lane < last:
        _take_few(VECTORS, lane, min(last, lane + FEW), base, count, partly, keys, step, scale, here)
        lane += FEW


@numba.njit  # type: ignore[untyped-decorator]
def _take_sixteens(
    first: int, last: int, base: int, count: int, partly: bool, keys: int, step: int, scale: float, here: Room
) -> None:
    """By AMX."""
    size, chunks = here.size, (count + 31) // 32
    scores, others = here.scores, here.scores + 4 * KEYS * LANES
    cpu_flash.score(here.queries + 4 * first, here.query_step, size, keys, step, chunks, scores)
    for lane in range(first, last, LANES):
        if lane + LANES < last:  # the matrix unit computes the next scores while the vectors do this softmax
            query = here.queries + 4 * (lane + LANES)
            cpu_flash.score(query, here.query_step, size, keys, step, chunks, others)
        totals = _soften(scores, lane, last, base, count, partly, scale, here)
        cpu_flash.gather(here.weights, here.values, size, chunks, totals)
        scores, others = others, scores


@numba.njit  # type: ignore[untyped-decorator]
def _soften(scores: int, lane: int, last: int, base: int, count: int, partly: bool, scale: float, here: Room) -> Any:
    """The softmax of 16 lanes; where their totals lie."""
    if partly:
        cpu_softmax.hide(scores, base, here.floors + 4 * lane, here.limits + 4 * lane)
    totals = here.totals + 4 * lane * here.size
    cpu_softmax.soften_sixteen(
        scores,
        (count + 31) // 32,
        scale,
        here.references + 4 * lane,
        here.sums + 4 * lane,
        totals,
        here.size // 16,
        min(LANES, last - lane),
        here.weights,
    )
    return totals


@numba.njit  # type: ignore[untyped-decorator]
def _take_threes(first: int, last: int, base: int, count: int, scale: float, here: Room) -> None:
    """In float32."""
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
    floors, limits = integers(here.floors, here.capacity), integers(here.limits, here.capacity)
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
