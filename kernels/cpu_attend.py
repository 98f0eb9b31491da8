"""Paged attention as a phase of a CPU's step: what an item of it is, and who puts its parts together.

Positions are attended to in splits of 256, counted from the sequence's start: each (token, head), a lane, begins anew
in each, and the results are joined in order (flash decoding, Dao et al. 2023; `cpu_softmax.join`). So one long row is
work for many threads, and who computes which split changes no bit. An item is

    many tiles     a tile: all splits one after the other, joined as they come
    few tiles      a split of a tile, kept in `Parts.store`; who ends the tile's last one joins them all

of some or all key heads: of all where there are items enough, since they lie side by side in memory.

Knows: items, splits. Must not know: how a tile goes through its blocks (`cpu_walk`), projections, the order of phases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from plait.kernels import cpu_amx
from plait.kernels.cpu_parts import Heads, Rounded, Rows, Team
from plait.kernels.cpu_room import Room, groups_together, padded_lanes, room, slot_bytes
from plait.kernels.cpu_share import SEGMENT, SPLIT_BLOCKS
from plait.kernels.cpu_team import add_atomically, claim, finish, wait
from plait.kernels.cpu_walk import (
    HAND_OUT,
    JOIN,
    KEEP,
    Bundle,
    Caches,
    init_lanes,
    first_block,
    hand_out_kept,
    join_kept,
    walk,
)


class Parts(NamedTuple):
    """How a step's attention is divided. `done` counts each tile's and bundle's ended splits, through all layers."""

    form: int  # see `cpu_blocks`
    apart: int  # 1: each split is an item
    kv_heads_per_item: int  # key heads of an item
    lanes: int  # the most of a tile, of one key head
    store: int  # float32 [split, key head, slot], see `cpu_room`
    done: int  # int64 [tile, bundle]


STORE_BYTES = 64 << 20  # pages of it that are never written cost nothing
JOINERS = 4  # of each thread's worth of tiles: joining is one thread's work for each bundle


@numba.njit  # type: ignore[untyped-decorator]
def divide(tiles: int, pieces: int, longest: int, lanes: int, heads: Heads, threads: int) -> Any:
    """Whether splits are items by themselves, and how many key heads go together, so that there is work for all.

    `longest`: splits of the tile that has most.
    """
    apart, kv_heads_per_item = np.int64(0), np.int64(heads.groups)
    if 2 * longest * threads > pieces and pieces > tiles:
        apart = np.int64(pieces * heads.groups * slot_bytes(lanes, heads.size) <= STORE_BYTES)
    if apart:
        kv_heads_per_item = min(kv_heads_per_item, np.int64(JOINERS * tiles * heads.groups // threads))
    items = pieces if apart else tiles
    return apart, max(np.int64(1), min(kv_heads_per_item, np.int64(items * heads.groups // threads)))


@numba.njit  # type: ignore[untyped-decorator]
def attend(
    team: Team,
    phase: int,
    qkv: Any,
    caches: Caches,
    heads: Heads,
    rows: Rows,
    parts: Parts,
    memory: int,
    capacity: int,
    out: Rounded,
) -> None:
    """Attention of the turned queries in qkv [T, (H + 2 G) D] over each row's pages, to out [T, H * D].

    `memory`: this thread's room for so many lanes.
    """
    here = room(memory, capacity, heads.size)
    bundles = (heads.groups + parts.bundle - 1) // parts.bundle
    items = (rows.pieces[rows.num_tiles] if parts.apart else rows.num_tiles) * bundles
    if team.scratch:
        cpu_amx.load_tile_config(here.shapes)
    while True:
        item = claim(team.counters, phase, 1)
        if item >= items:
            break
        piece, first = item // bundles, item % bundles * parts.bundle
        tile = _tile_of(piece, rows) if parts.apart else piece
        all_heads = _bundle(rows, tile, heads, first, min(heads.groups, first + parts.bundle))
        step = groups_together(all_heads.lanes, here)
        for group in range(all_heads.group, all_heads.end_group, step):
            bundle = _bundle(rows, tile, heads, group, min(all_heads.end_group, group + step))
            if parts.apart:
                _one_split(piece, tile, bundle, qkv, caches, heads, rows, parts, here, out)
            else:
                _all_splits(tile, bundle, qkv, caches, heads, rows, parts.form, here, out)
        if parts.apart:
            _join_if_last(tile * bundles + item % bundles, tile, all_heads, heads, rows, parts, out)
        finish(team.counters, phase, 1)
    if team.scratch:
        cpu_amx.load_tile_config(team.scratch)
    wait(team.counters, phase, items)


@numba.njit  # type: ignore[untyped-decorator]
def _tile_of(piece: int, rows: Rows) -> Any:
    """The tile that a split, counted through all tiles, belongs to."""
    low, high = np.int64(0), np.int64(rows.num_tiles - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if rows.pieces[middle] <= piece:
            low = middle
        else:
            high = middle - 1
    return low


@numba.njit  # type: ignore[untyped-decorator]
def _bundle(rows: Rows, tile: int, heads: Heads, group: int, end_group: int) -> Any:
    first: Any = np.int64(rows.tiles[tile])
    last: Any = np.int64(rows.tiles[tile + 1])
    tokens: Any = np.int64(0)
    for segment in range(first, last):
        tokens += rows.segments[SEGMENT * segment + 2]
    lanes = tokens * heads.shared
    return Bundle(first, last, lanes, padded_lanes(lanes), group, end_group)


@numba.njit  # type: ignore[untyped-decorator]
def _all_splits(
    tile: int, bundle: Bundle, qkv: Any, caches: Caches, heads: Heads, rows: Rows, form: int, here: Room, out: Rounded
) -> None:
    splits = np.int64(rows.pieces[tile + 1] - rows.pieces[tile])
    init_lanes(form, bundle, qkv, caches, heads, rows, True, here)
    first = first_block(bundle, here) // SPLIT_BLOCKS  # what is before it no lane sees
    for split in range(first, splits):
        if split > first:
            init_lanes(form, bundle, qkv, caches, heads, rows, False, here)
        what = HAND_OUT if splits == first + 1 else JOIN if split > first else KEEP
        to = here.joined
        walk(form, bundle, SPLIT_BLOCKS * split, what, to, bundle.lanes, caches, heads, rows, here, out)
    if splits > first + 1:
        hand_out_kept(form, bundle, here.joined, bundle.lanes, heads, rows, out)


@numba.njit  # type: ignore[untyped-decorator]
def _one_split(
    piece: int,
    tile: int,
    bundle: Bundle,
    qkv: Any,
    caches: Caches,
    heads: Heads,
    rows: Rows,
    parts: Parts,
    here: Room,
    out: Rounded,
) -> None:
    split, alone = piece - rows.pieces[tile], rows.pieces[tile + 1] - rows.pieces[tile] == 1
    init_lanes(parts.form, bundle, qkv, caches, heads, rows, True, here)
    to, what = _slots(piece, bundle.group, heads, parts), HAND_OUT if alone else KEEP
    walk(parts.form, bundle, SPLIT_BLOCKS * split, what, to, parts.lanes, caches, heads, rows, here, out)


@numba.njit  # type: ignore[untyped-decorator]
def _slots(piece: int, group: int, heads: Heads, parts: Parts) -> Any:
    """Where a split's slots lie, from a key head's on."""
    return parts.store + (piece * heads.groups + group) * slot_bytes(parts.lanes, heads.size)


@numba.njit  # type: ignore[untyped-decorator]
def _join_if_last(place: int, tile: int, bundle: Bundle, heads: Heads, rows: Rows, parts: Parts, out: Rounded) -> None:
    begin_, end = np.int64(rows.pieces[tile]), np.int64(rows.pieces[tile + 1])
    if end - begin_ == 1 or (add_atomically(parts.done + 8 * place, 1) + 1) % (end - begin_):
        return
    to = _slots(begin_, bundle.group, heads, parts)
    for piece in range(begin_ + 1, end):
        join_kept(bundle, _slots(piece, bundle.group, heads, parts), to, parts.lanes, heads.size)
    hand_out_kept(parts.form, bundle, to, parts.lanes, heads, rows, out)
