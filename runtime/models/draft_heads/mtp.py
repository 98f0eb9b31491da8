"""MTP layers (multi-token prediction, arXiv 2412.19437), as MiMo has one (arXiv 2505.07608).

The hidden state of the model before its final norm and the embedding of the next token, each normed, are joined in this
order and projected to the input of a layer; the normed output goes to the model's own output head, and into the next
entry of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from plait.runtime.arrays import Float32Array
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.draft_heads.config import FLOAT32_BYTES, HeadConfig, cache_bytes
from plait.runtime.models.draft_heads.embedding import model_embedding
from plait.runtime.models.draft_heads.head import DraftHead, EmbeddingRows, HeadRow
from plait.runtime.models.weight_shapes import MTP_LAYER, mtp_shapes

ModelLogits = Callable[[Float32Array], Float32Array]  # of normed hidden states: [n, C] -> [n, V]


class MtpHead(DraftHead):
    """tensors: float32 by name in the layer, as published. model_logits: the model's output head."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: Mapping[str, Float32Array],
        embed: EmbeddingRows,
        model_logits: ModelLogits,
    ) -> None:
        super().__init__(config, tensors, embed)
        self._model_logits = model_logits

    def forward(self, rows: Sequence[HeadRow]) -> Float32Array:
        """See `DraftHead`."""
        return self._norm(super().forward(rows), "final_layernorm")

    def logits(self, hidden: Float32Array) -> Float32Array:
        """See `DraftHead`."""
        return self._model_logits(hidden)

    def _layer_inputs(self, embedded: Float32Array, hidden: Float32Array) -> tuple[Float32Array, Float32Array]:
        normed = self._norm(hidden, "hidden_layernorm"), self._norm(embedded, "token_layernorm")
        residual = self._project(np.concatenate(normed, axis=1), "input_proj")
        return residual, self._norm(residual, "input_layernorm")


def load_mtp(tensors: Checkpoint, model: Checkpoint, model_logits: ModelLogits, max_length: int) -> MtpHead:
    """Returns the MTP layer of a model, for texts of at most `max_length` tokens.

    tensors: of the layer (`mtp_shapes`). Raises ModelError.
    """
    layer = replace(model.config, context_length=min(model.config.context_length, max_length))
    config = HeadConfig(layer, layer.hidden_size, (layer.num_layers,))
    arrays = {name.removeprefix(MTP_LAYER): tensors.float32_array(name) for name in tensors.names()}
    return MtpHead(config, arrays, model_embedding(model), model_logits)


def mtp_bytes(model: ModelConfig, num_tokens: int) -> int:
    """Returns the bytes of an MTP layer in float32, and its `cache_bytes`."""
    num_weights = sum(math.prod(shape) for shape in mtp_shapes(model).values())
    return num_weights * FLOAT32_BYTES + cache_bytes(model, num_tokens, model.hidden_size)
