"""Opens the weights of a model: a GGUF file or a folder of safetensors.

Opening checks the name and shape of every tensor that the config needs.
"""

from __future__ import annotations

from pathlib import Path

from plait.runtime.errors import ModelNotFound
from plait.runtime.models.checkpoint_interface import Checkpoint, CompleteCheckpoint
from plait.runtime.models.weight_shapes import expected_shapes
from plait.runtime.weights.gguf_checkpoint import GGUFCheckpoint
from plait.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint

__all__ = ["Checkpoint", "expected_shapes", "open_checkpoint"]


def open_checkpoint(path: str | Path) -> CompleteCheckpoint:
    """Opens a .gguf file or a Hugging Face folder.

    Raises ModelNotFound, UnsupportedModel, or CorruptModel if a tensor is missing or its shape contradicts the config.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"there is no model at {path}")
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
