"""Adds the updates of adapters to the linear layers of a torch decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from plait.kernels.operators import LinearOp
from plait.runtime.adapters.adapter import EMBEDDING, GROUPS, HEAD, Adapter, LowRankUpdate
from plait.runtime.arrays import IntArray
from plait.runtime.models import layers
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.layers import ProductPlace
from plait.runtime.models.registry import FAMILIES_BY_NAME


class _Update(NamedTuple):
    """A `PlacedUpdate` on the device: outputs `begin` to `end`."""

    begin: int
    end: int
    down: torch.Tensor  # [r, K]
    up: torch.Tensor  # [N, r]
    bias: torch.Tensor | None  # [N]


Placed = dict[ProductPlace | None, list[_Update]]  # None: the embedding


class TorchAdapters:
    """Implements `adapter_pool.AdapterSlots`: the tensors of adapters on a device, in the dtype of the model.

    linear: computes their products.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, linear: LinearOp, num_slots: int
    ) -> None:
        self._config, self._dtype, self._device, self._linear = config, dtype, device, linear
        self._slots: list[Placed] = [{} for _ in range(num_slots)]

    def prepare(self, adapter: Adapter) -> Placed:
        """As in `AdapterSlots`."""
        family = FAMILIES_BY_NAME[self._config.architecture]
        placed = {
            ProductPlace(layer, group): adapter.placed(self._config, family, layer, group)
            for layer in range(self._config.num_layers)
            for group in GROUPS
        }
        on_device: Placed = {
            place: [self._on_device(*update) for update in updates] for place, updates in placed.items() if updates
        }
        for outer, module in ((layers.HEAD, HEAD), (None, EMBEDDING)):
            if module in adapter.updates:
                on_device[outer] = [self._on_device(0, adapter.updates[module])]
        return on_device

    def _on_device(self, begin: int, update: LowRankUpdate) -> _Update:
        tensors = [
            None if part is None else torch.tensor(part, dtype=self._dtype, device=self._device)
            for part in (update.down, update.up, update.bias)
        ]
        down, up, bias = tensors
        assert down is not None and up is not None
        return _Update(begin, begin + len(up), down, up, bias)

    def place(self, slot: int, adapter: Placed | None) -> None:
        """As in `AdapterSlots`."""
        self._slots[slot] = adapter or {}

    def of_head(self, slots: IntArray) -> TorchStepUpdates | None:
        """`step` of rows with logits; None if no adapter of theirs changes the head."""
        return self.step(slots) if any(layers.HEAD in self._slots[slot] for slot in slots if slot >= 0) else None

    def step(self, slots: IntArray) -> TorchStepUpdates:
        """The updates of a step. slots [T]: the index of each token's adapter; -1 is none."""
        tokens = {int(slot): np.flatnonzero(slots == slot) for slot in np.unique(slots) if slot >= 0}
        groups = [(torch.from_numpy(of_slot).to(self._device), self._slots[slot]) for slot, of_slot in tokens.items()]
        return TorchStepUpdates(groups, self._linear)


class TorchStepUpdates:
    """Implements `layers.StepUpdates`: the tokens of each adapter, and its updates."""

    def __init__(self, groups: Sequence[tuple[torch.Tensor, Placed]], linear: LinearOp) -> None:
        self._groups, self._linear = groups, linear

    def add_to(self, out: torch.Tensor, x: torch.Tensor, place: ProductPlace) -> None:
        """As in `StepUpdates`."""
        for tokens, updates in self._groups:
            for update in updates.get(place, ()):
                delta = self._linear(self._linear(x[tokens], update.down, None), update.up, update.bias)
                out[:, update.begin : update.end].index_add_(0, tokens, delta)

    def add_to_embeddings(self, out: torch.Tensor, token_ids: torch.Tensor) -> None:
        """As in `StepUpdates`."""
        for tokens, updates in self._groups:
            for update in updates.get(None, ()):
                out.index_add_(0, tokens, self._linear(update.down.T[token_ids[tokens]], update.up, None))
