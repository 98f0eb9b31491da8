"""A model's weights under Hugging Face names, from a GGUF file or a folder of safetensors.

Every tensor the config calls for is looked for, and its shape compared, when the checkpoint is opened.
Knows: which container a path is. Must not know: what is in one.
"""

from __future__ import annotations

from pathlib import Path

from plait.runtime.errors import ModelNotFound
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.weights.gguf_checkpoint import GGUFCheckpoint
from plait.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint
from plait.runtime.weights.shape_check import expected_shapes

__all__ = ["Checkpoint", "expected_shapes", "open_checkpoint"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder.

    Raises ModelNotFound, CorruptModel (a tensor is missing or has another shape than the config says) or
    UnsupportedModel.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"there is no model at {path}")
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)
