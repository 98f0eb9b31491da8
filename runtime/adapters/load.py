"""Loads the adapters that a runtime begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from plait.runtime.adapters.adapter import Adapter
from plait.runtime.adapters.gguf_adapter import read_gguf_adapter
from plait.runtime.adapters.peft_folder import read_peft_folder
from plait.runtime.errors import InputError
from plait.runtime.models.config import ModelConfig
from plait.runtime.weights.checkpoint import expected_shapes


def load_adapters(paths: Mapping[str, str], config: ModelConfig, digests: dict[str, str]) -> Iterator[Adapter]:
    """Yields the adapters (name -> folder of peft, or GGUF file) for a model, and sets the digest of each by its name.

    One after the other, so that the numbers of those before need not be kept. Raises InputError and ModelError.
    """
    shapes = expected_shapes(config)
    for name, path in paths.items():
        location = Path(path)
        try:
            if not (location.is_dir() or location.is_file()):
                raise InputError(f"the adapter {name!r}: there is no {path}")
            read = read_peft_folder if location.is_dir() else read_gguf_adapter
            adapter = read(name, location, config, shapes)
        except OSError as error:
            raise InputError(f"the adapter {name!r} cannot be read: {error}") from None
        digests[name] = adapter.digest
        yield adapter
