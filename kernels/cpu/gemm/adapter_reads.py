"""What the products of a step read of the adapters of its rows, and what of it they prefetch.

In a step of many adapters each matrix is read once, in pieces that are too short for the processor's own prefetchers,
and memory takes longer than arithmetic. So a product with the model's weights prefetches beside them, between its own
instructions, what is read next: the `up` of its tiles, and its share of the `down` of the next product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import kernel_types as types
from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Int, carray, intrinsic
from plait.kernels.cpu.gemm.block_values import PIECE_BYTES
from plait.kernels.cpu.gemm.layouts import DOWN_OUTPUTS, TILE_OUTPUTS
from plait.kernels.cpu.kernel_args import as_pointer
from plait.kernels.cpu.kernel_types import PrefetchList, RowUpdates

ROWS_PER_ITEM = 4
MAX_PIECES = 256


def updated_rows(updates: RowUpdates, first: int, count: int) -> Iterator[tuple[Any, Any]]:
    """Those of some rows whose adapters change the product, and their rows of the table."""
    for row in range(first, first + count):
        if updates.slots[row] >= 0:
            entry = updates.table[updates.slots[row] * updates.rows_per_adapter + updates.first]
            if entry[types.DOWN_TILES]:
                yield row, entry


def down_items(updates: RowUpdates) -> int:
    """The items of the product with `down`: a tile of terms of a few rows."""
    groups = (len(updates.slots) + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
    return int(groups * (updates.terms.shape[1] // DOWN_OUTPUTS))


def parts_of_down(updates: RowUpdates, first: int, last: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The parts of items [first, last): a tile of `down`, the first of neighbouring rows with one adapter, the row
    after the last, and their row of the table."""
    tiles = updates.terms.shape[1] // DOWN_OUTPUTS
    for item in range(first, last):
        tile, row = item % tiles, item // tiles * ROWS_PER_ITEM
        after_last = min(len(updates.slots), row + ROWS_PER_ITEM)
        while row < after_last:
            slot, end = updates.slots[row], row + 1
            while end < after_last and updates.slots[end] == slot:
                end += 1
            if slot >= 0:
                entry = updates.table[slot * updates.rows_per_adapter + updates.first]
                if tile < entry[types.DOWN_TILES]:
                    yield tile, row, end, entry
            row = end


@intrinsic
def list_memory(b: Any) -> Int:
    """Returns the address of MAX_PIECES int64 of the current function."""
    return b.ptrtoint(v.allocate_on_stack(b, ir.ArrayType(v.I64, MAX_PIECES)), v.I64)


def list_up(ahead: PrefetchList, updates: RowUpdates, first_row: int, rows: int, tile: int, tiles: int) -> PrefetchList:
    """Adds the `up` of some rows and tiles to a list."""
    latest = 0
    for _, entry in updated_rows(updates, first_row, rows):
        if entry[types.TILES_OF_UP] != latest:
            latest = entry[types.TILES_OF_UP]
            of_tiles = carray(as_pointer(latest + 8 * types.TILE_COLUMNS * tile), (tiles, types.TILE_COLUMNS), np.int64)
            last = of_tiles[tiles - 1]
            end = last[types.UP_AT] + 2 * TILE_OUTPUTS * last[types.TERMS_OF_TILE]
            ahead = _add(ahead, of_tiles[0, types.UP_AT], end)
    return ahead


def list_next_down(ahead: PrefetchList, updates: RowUpdates, first: int, last: int, items: int) -> PrefetchList:
    """Adds what the next product reads of `down` to a list: the share of items [first, last) of this one's `items`."""
    following, num_parts = updates._replace(first=updates.first + 1), down_items(updates)
    for tile, _, _, entry in parts_of_down(following, num_parts * first // items, num_parts * last // items):
        begin = entry[types.DOWN_AT] + tile * entry[types.DOWN_STRIDE]
        ahead = _add(ahead, begin, begin + entry[types.DOWN_STRIDE])
    return ahead


def _add(ahead: PrefetchList, begin: int, end: int) -> PrefetchList:
    """Adds the pieces of [begin, end), as many as there is room for."""
    pieces = carray(as_pointer(ahead.address), (MAX_PIECES,), np.int64)
    count = min((end - begin + PIECE_BYTES - 1) // PIECE_BYTES, MAX_PIECES - ahead.length)
    for i in range(count):
        pieces[ahead.length + i] = begin + PIECE_BYTES * i
    return PrefetchList(ahead.address, ahead.length + count)
