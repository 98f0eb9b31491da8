"""Packs adapters for the CPU's decoder. Imports llvmlite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.kernels.cpu.low_rank.adapters import AdapterUpdates, CpuAdapters, ProductUpdate
from plait.runtime.adapters.adapter import GROUPS, Adapter
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME


def pack_adapters(
    adapters: Iterable[Adapter], config: ModelConfig, num_outputs: Sequence[Sequence[int]]
) -> CpuAdapters:
    """The adapters of a model. num_outputs: of the products of each layer, in the order of `GROUPS`."""
    return CpuAdapters((_updates_of(adapter, config) for adapter in adapters), num_outputs)


def _updates_of(adapter: Adapter, config: ModelConfig) -> AdapterUpdates:
    family = FAMILIES_BY_NAME[config.architecture]
    return [
        [
            [
                ProductUpdate(begin, update.down, update.up, update.bias)
                for begin, update in adapter.placed(config, family, layer, group)
            ]
            for group in GROUPS
        ]
        for layer in range(config.num_layers)
    ]
