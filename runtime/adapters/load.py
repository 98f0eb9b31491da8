"""Loads the adapters that a runtime begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plait.runtime.adapters.adapter import Adapter
from plait.runtime.adapters.peft_folder import read_peft_folder
from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.weights.checkpoint import expected_shapes


def load_adapters(paths: Mapping[str, str], config: ModelConfig) -> tuple[Adapter, ...]:
    """The adapters (name -> folder) for a model. Raises InputError or ModelError, as `read_peft_folder` does."""
    shapes, adapters = expected_shapes(config), list[Adapter]()
    for name, path in paths.items():
        folder = Path(path)
        if not folder.is_dir():
            raise InputError(f"the adapter {name!r}: {path} is no folder with adapter_config.json")
        adapters.append(read_peft_folder(name, folder, config, shapes))
    return tuple(adapters)
