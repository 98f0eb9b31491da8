"""The inputs and the output of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840).

The embedding and the hidden state are normed and joined for attention; the hidden state alone is the residual.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plait.runtime.arrays import Float32Array, IntArray
from plait.runtime.models.draft_heads.eagle3_config import Eagle3Config
from plait.runtime.models.draft_heads.head import DraftHead, EmbeddingRows


class Eagle3Head(DraftHead):
    """tensors: float32 by name, as published, but for `midlayer.`. token_ids: of each output, [draft vocabulary]."""

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, Float32Array], embed: EmbeddingRows, token_ids: IntArray
    ) -> None:
        super().__init__(config, tensors, embed)
        self._norms_residual, self._token_ids = config.norms_residual, token_ids

    def join(self, states: Float32Array) -> Float32Array:
        """Joins the captured hidden states [n, 3 C] of the model to hidden states [n, C] of the head."""
        return self._project(states, "fc")

    def logits(self, hidden: Float32Array) -> Float32Array:
        """See `DraftHead`. Tokens without an output have -inf."""
        logits = np.full((len(hidden), self.config.layer.vocab_size), -np.inf, np.float32)
        logits[:, self._token_ids] = self._project(self._norm(hidden, "norm"), "lm_head")
        return logits

    def _layer_inputs(self, embedded: Float32Array, hidden: Float32Array) -> tuple[Float32Array, Float32Array]:
        normed = self._norm(hidden, "hidden_norm")
        x = np.concatenate([self._norm(embedded, "input_layernorm"), normed], axis=1)
        return normed if self._norms_residual else hidden, x
