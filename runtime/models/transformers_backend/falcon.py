"""Falcon's attention for transformers' attention interface, which transformers' own Falcon does not call."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def replace_attention(module: torch.nn.Module, attend: Callable[..., Any]) -> None:
    """Replaces the forward of a `FalconAttention`; other modules stay unchanged."""
    if type(module).__name__ != "FalconAttention":
        return
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: torch.Tensor, *, position_embeddings: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        heads = self._split_heads(self.query_key_value(hidden_states))  # each [1, T, heads, D]
        q, k, v = (states.transpose(1, 2) for states in heads)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attended, _ = attend(self, q, k, v, None)
        return self.dense(attended.reshape(*hidden_states.shape[:2], -1)), None

    module.forward = MethodType(forward, module)
