"""Adds the updates of adapters to the linear layers of a torch decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from plait.kernels.operators import LinearOp
from plait.runtime.adapters.adapter import GROUPS, Adapter
from plait.runtime.arrays import IntArray
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


class TorchAdapters:
    """The tensors of some adapters on a device, in the dtype of the model. linear: computes their products."""

    def __init__(
        self,
        adapters: Iterable[Adapter],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearOp,
    ) -> None:
        def on_device(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
            return torch.tensor(array, dtype=dtype, device=device)

        family = FAMILIES_BY_NAME[config.architecture]
        self._device, self._linear = device, linear
        self._updates: list[dict[ProductPlace, list[_Update]]] = []
        for adapter in adapters:
            placed = {
                ProductPlace(layer, group): adapter.placed(config, family, layer, group)
                for layer in range(config.num_layers)
                for group in GROUPS
            }
            self._updates.append(
                {
                    place: [
                        _Update(
                            begin,
                            begin + len(update.up),
                            on_device(update.down),
                            on_device(update.up),
                            None if update.bias is None else on_device(update.bias),
                        )
                        for begin, update in updates
                    ]
                    for place, updates in placed.items()
                    if updates
                }
            )

    def step(self, slots: IntArray) -> TorchStepUpdates:
        """The updates of a step. slots [T]: the index of each token's adapter; -1 is none."""
        tokens = {int(slot): np.flatnonzero(slots == slot) for slot in np.unique(slots) if slot >= 0}
        groups = [(torch.from_numpy(of_slot).to(self._device), self._updates[slot]) for slot, of_slot in tokens.items()]
        return TorchStepUpdates(groups, self._linear)


class TorchStepUpdates:
    """Implements `layers.StepUpdates`: the tokens of each adapter, and its updates."""

    def __init__(
        self, groups: Sequence[tuple[torch.Tensor, dict[ProductPlace, list[_Update]]]], linear: LinearOp
    ) -> None:
        self._groups, self._linear = groups, linear

    def add_to(self, out: torch.Tensor, x: torch.Tensor, place: ProductPlace) -> None:
        """As in `StepUpdates`."""
        for tokens, updates in self._groups:
            for update in updates.get(place, ()):
                delta = self._linear(self._linear(x[tokens], update.down, None), update.up, update.bias)
                out[:, update.begin : update.end].index_add_(0, tokens, delta)
