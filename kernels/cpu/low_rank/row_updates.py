"""Low-rank updates of a step's products (LoRA, arXiv:2106.09685), different ones for different rows.

Before a product, `multiply_down` writes the terms of each row that has an adapter: its inputs times the adapter's
`down` [r, K]. The product (`gemm.packed_linear`) adds them, times `up`, to each tile of outputs that it computes. So
all rows of a step share the product with the model's weights, and read the adapters' small matrices beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.kernels.cpu import kernel_types as types
from plait.kernels.cpu import vector_ops
from plait.kernels.cpu.gemm.adapter_reads import down_items, parts_of_down
from plait.kernels.cpu.gemm.amx_blocking import TileStream
from plait.kernels.cpu.gemm.layouts import DOWN_OUTPUTS, TILE_OUTPUTS
from plait.kernels.cpu.gemm.packed_linear import linear, multiply_tiles
from plait.kernels.cpu.kernel_types import PrefetchList, QuantizedActivations, RowUpdates
from plait.kernels.cpu.parallel.threads import ThreadContext, shared_ranges
from plait.kernels.cpu.vector_ops import address_of


def of_product(updates: RowUpdates, layer: int, product: int) -> RowUpdates:
    """The updates of one product of a layer; `layer` is their number for the products behind them."""
    return updates._replace(first=types.NUM_PRODUCTS * layer + product)


def rows_per_adapter(num_layers: int) -> int:
    """The rows of an adapter in the table."""
    return types.NUM_PRODUCTS * num_layers + types.NUM_OUTER


def adapted_linear(
    ctx: ThreadContext, phase: int, parts: Any, x: QuantizedActivations, out: Any, updates: RowUpdates
) -> None:
    """`linear` in phase + 1, after the product with the `down` of the rows' adapters, if there are any, in `phase`."""
    if len(updates.slots):
        multiply_down(ctx, phase, updates, x)
    linear(ctx, phase + 1, parts, x, out, updates)


def add_to_embedding(updates: RowUpdates, row: int, token: int, out: int, tiles: int) -> None:
    """Adds the update of a row's adapter to the embedding of its token, `tiles` times 32 float32 at `out`."""
    slot = updates.slots[row]
    if slot >= 0:
        entry = updates.table[slot * updates.rows_per_adapter + updates.first]
        if entry[types.DOWN_TILES]:
            terms = entry[types.DOWN_AT] + token * entry[types.DOWN_STRIDE]
            for i in range(tiles):
                described = entry[types.TILES_OF_UP] + 8 * types.TILE_COLUMNS * i
                vector_ops.add_products_at(out + 4 * TILE_OUTPUTS * i, terms, described)


def multiply_down(ctx: ThreadContext, phase: int, updates: RowUpdates, x: QuantizedActivations) -> None:
    """Writes the terms of the rows of x [T, K], int8, that have an adapter."""
    for first, last in shared_ranges(ctx, phase, down_items(updates)):
        for tile, row, end, entry in parts_of_down(updates, first, last):
            _write_terms(tile, row, end - row, entry, updates, x)


def _write_terms(tile: int, row: int, rows: int, entry: Any, updates: RowUpdates, x: QuantizedActivations) -> None:
    """Writes a tile of terms of rows with one adapter: the product with `down`, times the factors of the ranks."""
    stride = 4 * updates.terms.shape[1]
    terms = address_of(updates.terms) + row * stride + 4 * DOWN_OUTPUTS * tile
    stream = TileStream(0, 0, entry[types.DOWN_AT], entry[types.DOWN_STRIDE])
    multiply_tiles(
        entry[types.DOWN_PRODUCT], stream, tile, tile + 1, x, row, rows, terms, stride, 4 * DOWN_OUTPUTS,
        PrefetchList(0, 0),
    )  # fmt: skip
    factors, one = entry[types.FACTORS_AT] + 4 * DOWN_OUTPUTS * tile, entry[types.ONE_TERM] - DOWN_OUTPUTS * tile
    for i in range(rows):
        target = terms + i * stride
        vector_ops.scale_into(target, factors, np.float32(1.0), target, DOWN_OUTPUTS // 16)
        if one >= 0 and one < DOWN_OUTPUTS:  # kernels compare two numbers at a time
            updates.terms[row + i, entry[types.ONE_TERM]] = np.float32(1.0)
