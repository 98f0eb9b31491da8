"""Loads the adapters that a runtime begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plait.runtime.adapters.adapter import Adapter
from plait.runtime.adapters.gguf_adapter import read_gguf_adapter
from plait.runtime.adapters.peft_folder import read_peft_folder
from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.weights.checkpoint import expected_shapes


def load_adapters(paths: Mapping[str, str], config: ModelConfig) -> tuple[Adapter, ...]:
    """The adapters (name -> folder of peft, or GGUF file) for a model. Raises InputError and ModelError."""
    shapes, adapters = expected_shapes(config), list[Adapter]()
    for name, path in paths.items():
        location = Path(path)
        if not location.exists():
            raise InputError(f"the adapter {name!r}: there is no {path}")
        read = read_peft_folder if location.is_dir() else read_gguf_adapter
        adapters.append(read(name, location, config, shapes))
    return tuple(adapters)
