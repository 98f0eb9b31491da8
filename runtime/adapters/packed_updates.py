"""Places adapters in the slots of the CPU's decoder. Imports llvmlite."""

from __future__ import annotations

from collections.abc import Sequence

from plait.kernels.cpu.low_rank.adapters import AdapterUpdates, CpuAdapters, PackedAdapter, ProductUpdate
from plait.runtime.adapters.adapter import EMBEDDING, GROUPS, HEAD, Adapter
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME


class PackedAdapters(CpuAdapters):
    """Implements `adapter_pool.AdapterSlots`. num_outputs: of each layer's products, in the order of `GROUPS`, and at
    the end of head and embedding."""

    def __init__(
        self, config: ModelConfig, num_outputs: Sequence[Sequence[int]], num_slots: int, spare_bytes: int
    ) -> None:
        super().__init__(num_outputs, num_slots)
        self._config, self.spare_bytes = config, spare_bytes

    def prepare(self, adapter: Adapter) -> PackedAdapter:
        """As in `AdapterSlots`."""
        return self.pack(_updates_of(adapter, self._config))

    def num_bytes(self, adapter: PackedAdapter) -> int:
        """As in `AdapterSlots`."""
        return sum(array.nbytes for array in adapter.arrays)


def _updates_of(adapter: Adapter, config: ModelConfig) -> AdapterUpdates:
    family = FAMILIES_BY_NAME[config.architecture]
    of_layers = [
        [
            [
                ProductUpdate(begin, update.down, update.up, update.bias)
                for begin, update in adapter.placed(config, family, layer, group)
            ]
            for group in GROUPS
        ]
        for layer in range(config.num_layers)
    ]
    outer = [(adapter.updates.get(module), module == EMBEDDING) for module in (HEAD, EMBEDDING)]
    return [
        *of_layers,
        [[ProductUpdate(0, update.down, update.up, update.bias, last)] if update else [] for update, last in outer],
    ]
