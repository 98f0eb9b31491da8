"""Adds the updates of adapters to the products of a torch decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from plait.kernels.low_rank_table import COLUMNS, MAX_PIECES, RANK_STEP, LowRankPiece, LowRankProduct
from plait.kernels.operators import FusedOperators, Kernels, LinearOp
from plait.runtime.adapters.adapter import EMBEDDING, GROUPS, HEAD, MAX_RANK, Adapter, PlacedUpdate
from plait.runtime.arrays import IntArray
from plait.runtime.models import layers
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.layers import ProductPlace, StepUpdates
from plait.runtime.models.registry import FAMILIES_BY_NAME

MAX_TERMS = MAX_PIECES * -(-MAX_RANK // RANK_STEP) * RANK_STEP  # of a product
ALIGN = 64  # numbers; tensors of an adapter begin at multiples of it

Products = Mapping[ProductPlace | None, LowRankProduct]  # None: the embedding


class PlacedAdapter(NamedTuple):
    """An adapter on a device. entries: its entries of the table, int64 [products, COLUMNS]. memory: all its tensors."""

    products: Products
    entries: torch.Tensor
    memory: torch.Tensor


class TorchAdapters:
    """Implements `adapter_pool.AdapterSlots`: the tensors of adapters on a device, in the dtype of the model.

    With fused operators, kernels find them by a table on the device, in which `place` writes behind all steps launched
    so far. enqueue: adds work to the queue of the steps.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels, num_slots: int
    ) -> None:
        self._config, self._dtype, self._device, self._kernels = config, dtype, device, kernels
        self.spare_bytes = 0  # `prepare` takes the memory of the device
        self.enqueue: Callable[[Callable[[], None]], None] = lambda work: work()
        layer_places = (ProductPlace(layer, group) for layer in range(config.num_layers) for group in GROUPS)
        self._places: dict[ProductPlace | None, int] = {
            place: index for index, place in enumerate((*layer_places, layers.HEAD, None))
        }
        self._empty = PlacedAdapter({}, self._entries_of({}), torch.empty(0, device=device))
        self._slots = [self._empty] * num_slots
        self.num_terms = RANK_STEP  # the most of a product in any slot so far
        self._table = torch.zeros((num_slots, *self._empty.entries.shape), dtype=torch.int64, device=device)
        # Adapters are copied on a stream of their own, for which no step waits.
        self._upload_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # -- slots --------------------------------------------------------------------------------------

    def prepare(self, adapter: Adapter) -> PlacedAdapter:
        """As in `AdapterSlots`."""
        family = FAMILIES_BY_NAME[self._config.architecture]
        of_places: dict[ProductPlace | None, list[PlacedUpdate]] = {
            ProductPlace(layer, group): adapter.placed(self._config, family, layer, group)
            for layer in range(self._config.num_layers)
            for group in GROUPS
        }
        for outer, module in ((layers.HEAD, HEAD), (None, EMBEDDING)):
            if module in adapter.updates:
                of_places[outer] = [PlacedUpdate(0, adapter.updates[module])]
        parts: list[torch.Tensor] = []
        for place, placed in of_places.items():
            parts += self._parts_of(placed, place is None)
        with torch.cuda.stream(self._upload_stream):  # without one it does nothing
            memory, tensors = self._on_device(parts)
            left = iter(tensors)
            products = {place: _product(placed, left) for place, placed in of_places.items() if placed}
            entries = self._entries_of(products)
        if self._upload_stream is not None:
            self._upload_stream.synchronize()
        return PlacedAdapter(products, entries, memory)

    def _entries_of(self, products: Products) -> torch.Tensor:
        entries = torch.zeros((len(self._places), COLUMNS), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for place, product in products.items():
            entries[self._places[place]] = torch.tensor(product.entry())
        return entries

    def _parts_of(self, placed: Sequence[PlacedUpdate], is_embedding: bool) -> list[torch.Tensor]:
        """`down` of all updates, then `up` of each and its bias, if it has one, with ranks in whole steps."""
        padding = [-len(update.down) % RANK_STEP for _, update in placed]
        downs = [np.pad(update.down, ((0, more), (0, 0))) for (_, update), more in zip(placed, padding, strict=True)]
        parts = [np.concatenate(downs).T if is_embedding else np.concatenate(downs)] if placed else []
        for (_, update), more in zip(placed, padding, strict=True):
            parts += [np.pad(update.up, ((0, 0), (0, more))), *([] if update.bias is None else [update.bias])]
        return [torch.from_numpy(np.ascontiguousarray(part)).to(self._dtype) for part in parts]

    def _on_device(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The parts in one piece of memory, and that."""
        *offsets, size = accumulate((-(-part.numel() // ALIGN) * ALIGN for part in parts), initial=0)
        host = torch.zeros(size, dtype=self._dtype)
        for part, offset in zip(parts, offsets, strict=True):
            host[offset : offset + part.numel()] = part.flatten()
        memory = host.to(self._device)
        views = [memory[at : at + part.numel()].view(part.shape) for part, at in zip(parts, offsets, strict=True)]
        return memory, views

    def num_bytes(self, adapter: PlacedAdapter) -> int:
        """As in `AdapterSlots`."""
        return adapter.memory.nbytes

    def place(self, slot: int, adapter: PlacedAdapter | None) -> None:
        """As in `AdapterSlots`."""
        before, self._slots[slot] = self._slots[slot], adapter or self._empty
        products = self._slots[slot].products.values()
        self.num_terms = max([self.num_terms, *(product.num_terms for product in products)])
        self.enqueue(partial(self._write_entries, slot, self._slots[slot].entries, before.memory))

    def _write_entries(self, slot: int, entries: torch.Tensor, memory: torch.Tensor) -> None:
        """Writes a slot's entries. `memory`: of the adapter before, which steps launched so far may still read."""
        self._table[slot].copy_(entries, non_blocking=True)
        if memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(self._device))

    # -- steps --------------------------------------------------------------------------------------

    def of_head(self, slots: IntArray) -> StepUpdates | None:
        """`step` of rows with logits; None if no adapter of theirs changes the head."""
        changes = any(layers.HEAD in self._slots[slot].products for slot in slots if slot >= 0)
        return self.step(slots) if changes else None

    def step(self, slots: IntArray) -> StepUpdates:
        """The updates of a step. slots [T]: the index of each token's adapter; -1 is none."""
        if self._kernels.fused is not None:
            host = torch.from_numpy(slots)
            on_device = host.pin_memory().to(self._device, non_blocking=True) if self._upload_stream else host
            return self._by_table(self._kernels.fused, on_device, self.num_terms)
        tokens = {int(slot): np.flatnonzero(slots == slot) for slot in np.unique(slots) if slot >= 0}
        groups = [
            (torch.from_numpy(of_slot).to(self._device), self._slots[slot].products) for slot, of_slot in tokens.items()
        ]
        return GroupedUpdates(groups, self._kernels.linear)

    def captured(self, slots: torch.Tensor) -> StepUpdates:
        """The updates of a step that is captured. slots [T] int32, on the device: each replay reads them again."""
        assert self._kernels.fused is not None
        return self._by_table(self._kernels.fused, slots, MAX_TERMS)

    def _by_table(self, fused: FusedOperators, slots: torch.Tensor, num_terms: int) -> StepUpdates:
        return TableUpdates(fused, self._table, self._places, slots, num_terms)


class TableUpdates:
    """Implements `layers.StepUpdates` by kernels that find the tensors of each token's adapter in a table."""

    def __init__(
        self,
        fused: FusedOperators,
        table: torch.Tensor,
        places: Mapping[ProductPlace | None, int],
        slots: torch.Tensor,
        num_terms: int,
    ) -> None:
        self._fused, self._table, self._places, self._num_terms = fused, table, places, num_terms
        self._groups = fused.group_rows(slots, len(table))

    def add_to(self, out: torch.Tensor, x: torch.Tensor, place: ProductPlace) -> None:
        """As in `StepUpdates`."""
        self._add(out, x, place)

    def add_to_embeddings(self, out: torch.Tensor, token_ids: torch.Tensor) -> None:
        """As in `StepUpdates`."""
        self._add(out, token_ids, None)

    def _add(self, out: torch.Tensor, x: torch.Tensor, place: ProductPlace | None) -> None:
        self._fused.add_low_rank(out, x, self._table, self._places[place], self._groups, self._num_terms)


class GroupedUpdates:
    """Implements `layers.StepUpdates` by torch: the tokens of each adapter, and its products."""

    def __init__(self, groups: Sequence[tuple[torch.Tensor, Products]], linear: LinearOp) -> None:
        self._groups, self._linear = groups, linear

    def add_to(self, out: torch.Tensor, x: torch.Tensor, place: ProductPlace) -> None:
        """As in `StepUpdates`."""
        for tokens, products in self._groups:
            if place in products:
                self._add(out, tokens, self._linear(x[tokens], products[place].down, None), products[place])

    def add_to_embeddings(self, out: torch.Tensor, token_ids: torch.Tensor) -> None:
        """As in `StepUpdates`."""
        for tokens, products in self._groups:
            if None in products:
                self._add(out, tokens, products[None].down[token_ids[tokens]], products[None])

    def _add(self, out: torch.Tensor, tokens: torch.Tensor, terms: torch.Tensor, product: LowRankProduct) -> None:
        for begin, first, up, bias in product.pieces:
            delta = self._linear(terms[:, first : first + up.shape[1]], up, bias)
            out[:, begin : begin + len(up)].index_add_(0, tokens, delta)


def _product(placed: Sequence[PlacedUpdate], tensors: Iterator[torch.Tensor]) -> LowRankProduct:
    """The product of the next tensors, in the order of `TorchAdapters._parts_of`."""
    down, pieces, first = next(tensors), list[LowRankPiece](), 0
    for begin, update in placed:
        pieces.append(LowRankPiece(begin, first, next(tensors), None if update.bias is None else next(tensors)))
        first += pieces[-1].up.shape[1]
    return LowRankProduct(down, pieces)
