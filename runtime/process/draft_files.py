"""The files of a draft model: where they are, and the memory that they need."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from plait.runtime.config import MTP, EngineConfig
from plait.runtime.errors import InputError, ModelError, ModelNotFound
from plait.runtime.executor.runner_factory import check_draft_allowed
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.draft_heads.eagle3_config import head_cache_bytes, is_eagle3
from plait.runtime.models.draft_heads.mtp import mtp_bytes
from plait.runtime.models.weight_shapes import mtp_shapes
from plait.runtime.weights.checkpoint import open_checkpoint
from plait.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint

MAX_DRAFT_PAGES = 8192  # tokens whose KV the draft model keeps
BFLOAT16_BYTES = 2


def locate_draft(config: EngineConfig, model_path: Path) -> Path:
    """Returns the files of a model's draft model. Raises ModelError, and InputError for a model that has none."""
    check_draft_allowed(config, model_path)
    if config.draft == MTP:
        open_mtp(model_path)
        return model_path
    try:
        return draft_files(str(config.draft))
    except ModelNotFound as error:
        raise ModelNotFound(f"draft: {error}") from None


def draft_files(name: str) -> Path:
    """Returns the files of a draft model: as of any model, or the folder of an EAGLE-3 head. Raises ModelError."""
    folder = Path(os.path.expanduser(name))
    with contextlib.suppress(OSError, ValueError):  # a name that cannot be read as a path; `locate_model` tells
        if is_eagle3(folder):
            return folder
    return locate_model(name)


def open_mtp(model_path: Path) -> Checkpoint:
    """Opens the MTP layer in the files of a model.

    Raises ModelError, which names the tensor, and InputError for a model without one layer.
    """
    count = open_checkpoint(model_path).config.num_mtp_layers
    if count != 1:
        reason = f"'mtp' needs a model with one MTP layer; this one has {count} (num_nextn_predict_layers)"
        raise InputError(f"draft: {reason}")
    try:
        return SafetensorsCheckpoint(model_path, mtp_shapes)
    except ModelError as error:
        raise type(error)(f"draft: {error}") from None


def file_bytes(path: Path) -> int:
    """Returns the size of a file, or of the safetensors of a folder."""
    return sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path]))


def draft_bytes(name: str, model_path: Path) -> int:
    """Returns the bytes that the draft model `name` of a model takes, with caches as large as they can be.

    Raises ModelError and InputError.
    """
    if name == MTP:
        return mtp_bytes(open_mtp(model_path).config, MAX_DRAFT_PAGES)
    path = draft_files(name)
    if is_eagle3(path):
        return file_bytes(path) + head_cache_bytes(path, MAX_DRAFT_PAGES)
    config = open_checkpoint(path).config
    cache = MAX_DRAFT_PAGES * config.num_layers * 2 * config.num_kv_heads * config.head_dim * BFLOAT16_BYTES
    return file_bytes(path) + cache
