"""Adapters (LoRA) as the kernels of a decoder step read them; see `low_rank/row_updates.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm import packed_weights
from plait.kernels.cpu.gemm.layout_kernels import layout_kernel
from plait.kernels.cpu.gemm.layouts import TILE_OUTPUTS
from plait.kernels.cpu.kernel_args import aligned_empty, aligned_zeros
from plait.kernels.cpu.kernel_types import DOWN_TILES, HEAD, NUM_OUTER, TABLE_COLUMNS, TILE_COLUMNS

DOWN_BITS = 8
Floats = npt.NDArray[np.float32]


class ProductUpdate(NamedTuple):
    """Adds (x @ down.T) @ up.T + bias to N outputs of a product of x [T, K], from output `begin` on."""

    begin: int
    down: Floats  # [r, K]
    up: Floats  # [N, r]
    bias: Floats | None  # [N]
    is_embedding: bool = False  # x is 1 at one of K tokens, and else 0


AdapterUpdates = Sequence[Sequence[Sequence[ProductUpdate]]]
"""The updates of an adapter, for each layer and each of its products, in the order of `kernel_types`; the last ones
are of the products behind the layers."""


class PackedAdapter(NamedTuple):
    """The updates of one adapter. rows: int64 [products, TABLE_COLUMNS]. num_terms: the most of a product, in whole
    tiles. arrays: of which `rows` has the addresses."""

    rows: npt.NDArray[np.int64]
    num_terms: int
    arrays: Sequence[npt.NDArray[Any]]


class CpuAdapters:
    """The updates of the adapters in `num_slots` slots. `num_outputs`: of the products, as in `AdapterUpdates`.

    table: int64 [num_slots * products, TABLE_COLUMNS]; rows of zeros are of an empty slot. num_terms: the most of a
    product in any slot so far.
    """

    def __init__(self, num_outputs: Sequence[Sequence[int]], num_slots: int) -> None:
        self._num_outputs, self.num_terms = num_outputs, TILE_OUTPUTS
        self._placed: list[PackedAdapter | None] = [None] * num_slots
        self._rows = sum(map(len, num_outputs))
        self.table = np.zeros((num_slots * self._rows, TABLE_COLUMNS), np.int64)

    def pack(self, layers: AdapterUpdates) -> PackedAdapter:
        """Packs an adapter, in any thread.

        `down` is a packed weight of 8 bits, `up` is float16. Each rank's row of `down` and column of `up` are scaled to
        magnitudes up to 1, with a factor in float32, so that neither small nor large numbers leave the range of
        float16.
        """
        products = [
            _pack_product(updates, num_of_product) if updates else None
            for products, outputs in zip(layers, self._num_outputs, strict=True)
            for updates, num_of_product in zip(products, outputs, strict=True)
        ]
        packed = [product for product in products if product is not None]
        rows = [(0,) * TABLE_COLUMNS if product is None else product.rows for product in products]
        arrays = [array for product in packed for array in product.arrays]
        return PackedAdapter(
            np.array(rows, np.int64), max((product.num_terms for product in packed), default=0), arrays
        )

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Sets the adapter of a slot, which no running step uses; None empties it."""
        rows = slice(slot * self._rows, (slot + 1) * self._rows)
        self.table[rows] = 0 if adapter is None else adapter.rows
        self._placed[slot] = adapter
        self.num_terms = max(self.num_terms, 0 if adapter is None else adapter.num_terms)

    def change_head(self, slots: npt.NDArray[np.int32] | None) -> bool:
        """Whether an adapter in some of the slots (-1: none) changes the output head."""
        row = self._rows - NUM_OUTER + HEAD
        return slots is not None and bool(self.table[slots[slots >= 0] * self._rows + row, DOWN_TILES].any())


class _PackedProduct(NamedTuple):
    """As `PackedAdapter`, of one product: a row of the table."""

    rows: tuple[int, ...]
    num_terms: int
    arrays: Sequence[npt.NDArray[Any]]


def _pack_product(updates: Sequence[ProductUpdate], num_outputs: int) -> _PackedProduct:
    """One term behind the ranks stands for all biases."""
    if updates[0].is_embedding:
        return _pack_embedding(updates)
    num_ranks = sum(len(update.down) for update in updates)
    has_bias = any(update.bias is not None for update in updates)
    down = np.zeros((num_ranks + has_bias, updates[0].down.shape[1]), np.float32)
    up = np.zeros((num_ranks + has_bias, num_outputs + -num_outputs % TILE_OUTPUTS), np.float16)
    factors = aligned_zeros((len(down) + -len(down) % TILE_OUTPUTS,), np.float32)
    rank = 0
    for update in updates:
        ranks, end = slice(rank, rank + len(update.down)), update.begin + len(update.up)
        down[ranks], down_factors = _scaled(update.down)
        up[ranks, update.begin : end], up_factors = _scaled(update.up.T)
        factors[ranks] = down_factors * up_factors
        if update.bias is not None:
            up[num_ranks, update.begin : end] = update.bias
        rank = ranks.stop
    packed = packed_weights.pack(packed_weights.quantize(down, DOWN_BITS))
    up_tiles, tiles_table = _tiles(updates, up, num_ranks)
    row = (
        packed.address,
        packed.tile_bytes,
        len(packed.data),
        layout_kernel(packed.layout.name).product,
        factors.ctypes.data,
        num_ranks if has_bias else -1,
        tiles_table.ctypes.data,
    )
    return _PackedProduct(row, len(factors), (packed.data, factors, up_tiles, tiles_table))


def _pack_embedding(updates: Sequence[ProductUpdate]) -> _PackedProduct:
    """Rows of the terms of each token."""
    (update,) = updates
    up, factors = _scaled(update.up.T)
    terms = np.ascontiguousarray((update.down * factors[:, None]).T, np.float32)
    up_tiles, tiles_table = _tiles(updates, up.astype(np.float16), len(up))
    row = (terms.ctypes.data, terms.strides[0], 1, 0, 0, -1, tiles_table.ctypes.data)
    return _PackedProduct(row, 0, (terms, up_tiles, tiles_table))


def _scaled(rows: Floats) -> tuple[Floats, Floats]:
    """(rows of magnitudes up to 1, the factor of each)"""
    factors: Floats = np.abs(rows).max(axis=1)
    scaled: Floats = rows / np.where(factors, factors, 1).astype(np.float32)[:, None]
    return scaled, factors


def _tiles(
    updates: Sequence[ProductUpdate], up: npt.NDArray[np.float16], num_ranks: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int64]]:
    """(the rows of `up` [terms, outputs] that each tile needs, tile by tile; the table of the tiles)"""
    num_tiles = up.shape[1] // TILE_OUTPUTS
    first, last, rank = np.full(num_tiles, len(up)), np.zeros(num_tiles, np.int64), 0
    for begin, down, outputs, bias, _ in updates:
        tiles = slice(begin // TILE_OUTPUTS, -(-(begin + len(outputs)) // TILE_OUTPUTS))
        first[tiles] = np.minimum(first[tiles], rank)
        rank += len(down)
        last[tiles] = np.maximum(last[tiles], rank if bias is None else num_ranks + 1)
    first[last == 0], last[last == 0] = 0, 1  # the kernel adds at least one term, here zeros
    counts = last - first
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = aligned_empty((int(starts[-1]), TILE_OUTPUTS), np.float16)
    begin = 0
    for end in [*(np.flatnonzero(np.diff(first) | np.diff(last)) + 1), num_tiles]:  # tiles with the same terms
        of_tiles = up[first[begin] : last[begin], TILE_OUTPUTS * begin : TILE_OUTPUTS * end]
        shape = (end - begin, last[begin] - first[begin], TILE_OUTPUTS)
        target = rows[starts[begin] : starts[end]].reshape(shape)
        np.copyto(target, of_tiles.reshape(shape[1], shape[0], TILE_OUTPUTS).transpose(1, 0, 2))
        begin = end
    table = np.zeros((num_tiles, TILE_COLUMNS), np.int64)
    table[:, 0], table[:, 1] = first, counts
    table[:, 2] = rows.ctypes.data + rows.itemsize * TILE_OUTPUTS * starts[:-1]
    return rows, table
