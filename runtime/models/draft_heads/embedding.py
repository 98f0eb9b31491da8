"""Rows of an embedding in float32, where possible straight from the mapped file."""

from __future__ import annotations

from typing import Any

from plait.runtime.model_files.safetensors_bytes import BYTES, widen
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.draft_heads.head import EmbeddingRows


def row_reader(stored_type: str, rows: Any) -> EmbeddingRows:
    """Returns the reader of stored rows, uint8 [V, bytes of a row], of one of the types `BYTES`."""
    return lambda tokens: widen(stored_type, rows[tokens], (len(tokens), -1))


def model_embedding(model: Checkpoint) -> EmbeddingRows:
    """Returns the reader of the model's embedding. One of another type than `BYTES` is held in float32."""
    name = "model.embed_tokens.weight"
    stored_type = model.stored_type(name)
    if stored_type in BYTES:
        return row_reader(stored_type, model.raw_blocks(name)[1].reshape(model.config.vocab_size, -1))
    embedding = model.float32_array(name)
    return lambda tokens: embedding[tokens]
