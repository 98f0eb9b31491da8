"""The files of a draft model: where they are, and the memory that they need."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from plait.runtime.config import EngineConfig
from plait.runtime.errors import ModelNotFound
from plait.runtime.executor.runner_factory import check_draft_allowed
from plait.runtime.model_files.locate import locate_model
from plait.runtime.models.draft_heads.eagle3_config import head_cache_bytes, is_eagle3
from plait.runtime.weights.checkpoint import open_checkpoint

MAX_DRAFT_PAGES = 8192  # tokens whose KV the draft model keeps
BFLOAT16_BYTES = 2


def locate_draft(config: EngineConfig, model_path: Path) -> Path:
    """Returns the files of a model's draft model. Raises ModelError, and InputError for a model that has none."""
    check_draft_allowed(config, model_path)
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


def draft_cache_bytes(path: Path) -> int:
    """Returns the bytes of the KV cache of a draft model, as large as it can be. Raises ModelError."""
    if is_eagle3(path):
        return head_cache_bytes(path, MAX_DRAFT_PAGES)
    config = open_checkpoint(path).config
    return MAX_DRAFT_PAGES * config.num_layers * 2 * config.num_kv_heads * config.head_dim * BFLOAT16_BYTES
