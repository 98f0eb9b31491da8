"""Adapters (LoRA) as the kernels of a decoder step read them; see `low_rank/row_updates.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.gemm.layout_kernels import layout_kernel
from plait.kernels.cpu.gemm.layouts import DOWN_LAYOUT, DOWN_OUTPUTS, QUANT_BLOCK, TILE_OUTPUTS
from plait.kernels.cpu.kernel_args import CACHE_LINE, huge_zeros
from plait.kernels.cpu.kernel_types import DOWN_TILES, HEAD, NUM_OUTER, TABLE_COLUMNS, TILE_COLUMNS
from plait.kernels.cpu.low_rank.packing import UNIT_BYTES, UP_BYTES, Part, pack

MAX_PLANS = 1 << 10
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
        self._num_outputs, self.num_terms = num_outputs, DOWN_OUTPUTS
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
            (updates, num_of_product)
            for products, outputs in zip(layers, self._num_outputs, strict=True)
            for updates, num_of_product in zip(products, outputs, strict=True)
        ]
        plans = {i: _plan_of(*product) for i, product in enumerate(products) if product[0]}
        rows, begin = np.zeros((len(products), TABLE_COLUMNS), np.int64), 0
        memory = huge_zeros(sum(plan.num_bytes for plan in plans.values()))
        packing = _Packing([], [], [memory])
        for i, plan in plans.items():
            rows[i] = packing.add(products[i][0], plan, memory[begin : begin + plan.num_bytes])
            begin += plan.num_bytes
        pack(packing.parts)
        return PackedAdapter(rows, max((plan.num_terms for plan in plans.values()), default=0), packing.arrays)

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


def _plan_of(updates: Sequence[ProductUpdate], num_outputs: int) -> _Plan:
    inputs = 0 if updates[0].is_embedding else updates[0].down.shape[1]
    return _plan(num_outputs, inputs, tuple((x.begin, *x.up.shape, x.bias is not None) for x in updates))


class _Plan(NamedTuple):
    """The memory of a product's updates: the table of its tiles of outputs, `up`, the factors, and `down`.

    tiles: that table, with addresses from the begin of the memory, as the others. inputs, num_terms (in whole tiles): 0
    for the embedding.
    """

    inputs: int
    tiles: npt.NDArray[np.int64]
    factors: int
    down: int
    num_bytes: int
    num_terms: int


@lru_cache(MAX_PLANS)
def _plan(num_outputs: int, inputs: int, updates: tuple[tuple[int, int, int, bool], ...]) -> _Plan:
    """The plan of updates (begin, N, r, whether there is a bias). One term behind the ranks stands for all biases."""
    num_tiles, num_ranks = -(-num_outputs // TILE_OUTPUTS), sum(ranks for _, _, ranks, _ in updates)
    first, last, rank = np.full(num_tiles, num_ranks), np.zeros(num_tiles, np.int64), 0
    for begin, outputs, ranks, has_bias in updates:
        assert begin + outputs <= num_outputs, "compiled code writes where the table says"
        of_update = slice(begin // TILE_OUTPUTS, -(-(begin + outputs) // TILE_OUTPUTS))
        first[of_update] = np.minimum(first[of_update], rank)
        rank += ranks
        last[of_update] = np.maximum(last[of_update], num_ranks + 1 if has_bias else rank)
    first[last == 0], last[last == 0] = 0, 1  # the kernel adds at least one term, here zeros
    term_tiles = -(-(num_ranks + any(has_bias for *_, has_bias in updates)) // DOWN_OUTPUTS)
    table_bytes = 8 * TILE_COLUMNS * num_tiles
    ends = table_bytes + -table_bytes % CACHE_LINE + UP_BYTES * np.cumsum(last - first)
    tiles = np.stack([first, last - first, ends - UP_BYTES * (last - first)], axis=1)
    factors = int(ends[-1])
    down = factors + 4 * DOWN_OUTPUTS * term_tiles
    num_bytes = down + inputs // QUANT_BLOCK * UNIT_BYTES * term_tiles
    return _Plan(inputs, tiles, factors, down, num_bytes, DOWN_OUTPUTS * term_tiles if inputs else 0)


class _Packing(NamedTuple):
    """An adapter that is to be packed. read: what the parts have addresses of. arrays: what its table has them of."""

    parts: list[Part]
    read: list[Floats]
    arrays: list[npt.NDArray[Any]]

    def add(self, updates: Sequence[ProductUpdate], plan: _Plan, memory: npt.NDArray[np.uint8]) -> tuple[int, ...]:
        """Adds a product, which will be in `memory`. Returns its row of the table."""
        tiles, rank, one_term = int(memory.ctypes.data), 0, -1
        factors, packed = tiles + plan.factors, tiles + plan.down
        memory[: plan.tiles.nbytes].view(np.int64).reshape(plan.tiles.shape)[:] = plan.tiles + (0, 0, tiles)
        for update in updates:
            outputs, ranks = update.up.shape
            part = Part(self._address(update.up), outputs, ranks, update.begin, rank, tiles, factors)
            if plan.inputs:
                part = part._replace(down=self._address(update.down), inputs=plan.inputs, packed=packed)
            self.parts.append(part)
            rank += ranks
        biased = [update for update in updates if update.bias is not None]
        if biased:
            biases, one_term = np.zeros(TILE_OUTPUTS * len(plan.tiles), np.float32), rank
            for update in biased:
                biases[update.begin : update.begin + len(update.up)] = update.bias
            self.parts.append(Part(self._address(biases), len(biases), 1, 0, one_term, tiles))
        if not plan.inputs:  # of the embedding: rows of the terms of each token
            terms = np.ascontiguousarray((updates[0].down * np.abs(updates[0].up).max(axis=0)[:, None]).T, np.float32)
            self.arrays.append(terms)
            return terms.ctypes.data, terms.strides[0], 1, 0, 0, -1, tiles
        num_tiles, product = plan.num_terms // DOWN_OUTPUTS, layout_kernel(DOWN_LAYOUT.name).product
        return packed, plan.inputs // QUANT_BLOCK * UNIT_BYTES, num_tiles, product, factors, one_term, tiles

    def _address(self, array: Floats) -> int:
        self.read.append(np.ascontiguousarray(array, np.float32))
        return self.read[-1].ctypes.data
