"""Adapters (LoRA) as the kernels of a decoder step read them; see `gemm/low_rank.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.forms import TILE_OUTPUTS
from plait.kernels.cpu.gemm.low_rank import NUM_PRODUCTS, TABLE_COLUMNS, TILE_COLUMNS
from plait.kernels.cpu.kernel_args import aligned_empty

Floats = npt.NDArray[np.float32]


class ProductUpdate(NamedTuple):
    """Adds (x @ down.T) @ up.T + bias to N outputs of a product of x [T, K], from output `begin` on."""

    begin: int
    down: Floats  # [r, K]
    up: Floats  # [N, r]
    bias: Floats | None  # [N]


AdapterUpdates = Sequence[Sequence[Sequence[ProductUpdate]]]
"""The updates of an adapter, for each layer and each of its products, in the order of `gemm.low_rank`."""


class CpuAdapters:
    """The updates of several adapters. `num_outputs`: of the products of each layer, [layers][NUM_PRODUCTS].

    table: int64 [adapters * layers * NUM_PRODUCTS, TABLE_COLUMNS]. max_terms, max_inputs: the most of a product.
    """

    def __init__(self, adapters: Sequence[AdapterUpdates], num_outputs: Sequence[Sequence[int]]) -> None:
        self._arrays: list[npt.NDArray[np.float32] | npt.NDArray[np.int64]] = []  # of which the table has the addresses
        self.max_terms, self.max_inputs = 1, TILE_OUTPUTS
        self.table = np.zeros((len(adapters) * len(num_outputs) * NUM_PRODUCTS, TABLE_COLUMNS), np.int64)
        row = 0
        for layers in adapters:
            for products, outputs in zip(layers, num_outputs, strict=True):
                for updates, num_of_product in zip(products, outputs, strict=True):
                    if updates:
                        self.table[row] = self._pack(updates, num_of_product)
                    row += 1

    def _pack(self, updates: Sequence[ProductUpdate], num_outputs: int) -> tuple[int, int, int, int]:
        """The row of a product in the table. One term behind the ranks stands for all biases."""
        num_ranks = sum(len(update.down) for update in updates)
        num_terms = num_ranks + any(update.bias is not None for update in updates)
        num_tiles = -(-num_outputs // TILE_OUTPUTS)
        matrix = np.zeros((num_terms, num_tiles * TILE_OUTPUTS), np.float32)
        first = np.full(num_tiles, num_terms)
        last = np.zeros(num_tiles, np.int64)
        begin_term = 0
        for begin, _, up, bias in updates:
            end, end_term = begin + len(up), begin_term + up.shape[1]
            matrix[begin_term:end_term, begin:end] = up.T
            tiles = slice(begin // TILE_OUTPUTS, -(-end // TILE_OUTPUTS))
            first[tiles] = np.minimum(first[tiles], begin_term)
            last[tiles] = np.maximum(last[tiles], end_term)
            if bias is not None:
                matrix[num_ranks, begin:end] = bias
                last[tiles] = num_terms
            begin_term = end_term
        last[last == 0], first[first == num_terms] = 1, 0  # the kernel adds at least one term, here zeros
        counts = last - first
        up_rows = aligned_empty((int(counts.sum()), TILE_OUTPUTS), np.float32)
        starts = np.concatenate([[0], np.cumsum(counts)])
        for tile in range(num_tiles):
            of_tile = matrix[first[tile] : last[tile], TILE_OUTPUTS * tile : TILE_OUTPUTS * (tile + 1)]
            up_rows[starts[tile] : starts[tile + 1]] = of_tile
        tiles_table = np.zeros((num_tiles, TILE_COLUMNS), np.int64)
        tiles_table[:, 0], tiles_table[:, 1] = first, counts
        tiles_table[:, 2] = up_rows.ctypes.data + 4 * TILE_OUTPUTS * starts[:-1]
        down = aligned_empty((num_ranks, updates[0].down.shape[1]), np.float32)
        np.concatenate([update.down for update in updates], out=down)
        self._arrays += [up_rows, tiles_table, down]
        self.max_terms = max(self.max_terms, num_terms)
        self.max_inputs = max(self.max_inputs, down.shape[1])
        return down.ctypes.data, num_ranks, num_terms, tiles_table.ctypes.data
