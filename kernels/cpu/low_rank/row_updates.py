"""Low-rank updates of a step's products (LoRA, arXiv:2106.09685), different ones for different rows.

Before a product, `multiply_down` writes the terms of each row that has an adapter: its inputs times the adapter's
`down` [r, K]. The product adds them, times `up`, to each tile of 32 outputs that it computes (`add_up`). So all rows of
a step share the product with the model's weights, and read the adapters' small matrices beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.kernel_types import QuantizedActivations, RowUpdates
from plait.kernels.cpu.threads import ThreadContext, barrier_wait, claim_work, mark_done
from plait.kernels.cpu.vector_ops import address_of

BLOCK_INPUTS, TILE_OUTPUTS = 32, 32  # of the activations, and of the packed weights
QKV, OUTPUT, GATE_UP, DOWN, NUM_PRODUCTS = range(5)  # of a layer
# Columns of RowUpdates.table, whose rows are the products of an adapter's layers, one adapter after the other: the
# address of `down`, float16 [NUM_RANKS, K]; its rows, a multiple of RANKS_AT_ONCE; the terms, those behind the ranks
# being 1; the address of a table int64 [tiles, TILE_COLUMNS]; the address of the factors of the ranks, float32.
DOWN_AT, NUM_RANKS, NUM_TERMS, TILES_AT, FACTORS_AT, TABLE_COLUMNS = range(6)
RANKS_AT_ONCE = 4  # that read an input together
RANKS_PER_ITEM = 16
# Of a tile of 32 outputs: the first of its terms, their number, and the address of `up`, float16 [terms, 32].
FIRST_TERM, TERMS_OF_TILE, UP_AT, TILE_COLUMNS = range(4)


def of_product(updates: RowUpdates, layer: int, product: int) -> RowUpdates:
    """The updates of one product of a layer."""
    return RowUpdates(
        updates.slots,
        updates.table,
        NUM_PRODUCTS * layer + product,
        updates.rows_per_adapter,
        updates.terms,
        updates.inputs,
    )


def multiply_down(ctx: ThreadContext, phase: int, updates: RowUpdates, x: QuantizedActivations) -> None:
    """Writes the terms of the rows of x [T, K] that have an adapter. An item is RANKS_PER_ITEM terms of a row."""
    rows, blocks = x.scales.shape
    items_per_row = (updates.terms.shape[1] + RANKS_PER_ITEM - 1) // RANKS_PER_ITEM
    items = rows * items_per_row
    while True:
        item = claim_work(ctx.counters, phase, 1)
        if item >= items:
            break
        row, first = item // items_per_row, item % items_per_row * RANKS_PER_ITEM
        slot = updates.slots[row]
        if slot >= 0:
            entry = updates.table[slot * updates.rows_per_adapter + updates.first]
            if first < entry[NUM_TERMS]:
                _write_terms(row, first, blocks, entry, updates, x)
        mark_done(ctx.counters, phase, 1)
    barrier_wait(ctx.counters, phase, items)


def _write_terms(row: int, first: int, blocks: int, entry: Any, updates: RowUpdates, x: QuantizedActivations) -> None:
    """Items of one row write the same `inputs`."""
    inputs = address_of(updates.inputs) + 4 * row * updates.inputs.shape[1]
    for block in range(blocks):
        quants = address_of(x.quants) + BLOCK_INPUTS * (row * blocks + block)
        vector_ops.dequantize_block(quants, x.scales[row, block], inputs + 4 * BLOCK_INPUTS * block)
    ranks, terms = entry[NUM_RANKS], address_of(updates.terms) + 4 * row * updates.terms.shape[1]
    for rank in range(first, min(ranks, first + RANKS_PER_ITEM), RANKS_AT_ONCE):
        down = entry[DOWN_AT] + 2 * BLOCK_INPUTS * blocks * rank
        vector_ops.scaled_dots(inputs, down, 2 * blocks, entry[FACTORS_AT] + 4 * rank, terms + 4 * rank)
    for term in range(max(first, ranks), min(entry[NUM_TERMS], first + RANKS_PER_ITEM)):
        updates.terms[row, term] = np.float32(1.0)


def add_up(
    updates: RowUpdates, first_row: int, rows: int, tile: int, out: int, out_stride: int, tiles: int, tile_stride: int
) -> None:
    """Adds the updates of some rows to `tiles` tiles of outputs from `tile` on.

    out: the address of the first row's first tile; the others follow after `out_stride` and `tile_stride` bytes.
    """
    for row in range(first_row, first_row + rows):
        slot = updates.slots[row]
        if slot >= 0:
            entry = updates.table[slot * updates.rows_per_adapter + updates.first]
            if entry[NUM_TERMS]:
                terms = address_of(updates.terms) + 4 * row * updates.terms.shape[1]
                target = out + (row - first_row) * out_stride
                for i in range(tiles):
                    described = entry[TILES_AT] + 8 * TILE_COLUMNS * (tile + i)
                    vector_ops.add_products_at(target + i * tile_stride, terms, described)
