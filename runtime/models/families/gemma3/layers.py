"""The decoder of Gemma 3: four norms to a layer, scaled embeddings, GELU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.runtime.models.decoder import CosSin, Decoder, Layer
from plait.runtime.models.families.gemma3.config import LAYER_NORM_NAMES


class Gemma3Decoder(Decoder):
    """The decoder with norms before and after both attention and MLP."""

    supports_float16: ClassVar[bool] = False

    @cached_property
    def embedding_scale(self) -> float:
        """sqrt(hidden_size), rounded to the dtype as in training."""
        return torch.tensor(self.config.embedding_scale).to(self.dtype).item()

    def layer_forward(
        self,
        layer: Layer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos_sin: Sequence[CosSin],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer.post_attention_norm is not None
        assert layer.post_mlp_norm is not None
        x, h = self.add_rms_norm(x, delta, layer.attention_norm)
        attended = self.rms_norm(self.attend(layer.attention, h, cos_sin, cache, layout), layer.post_attention_norm)
        x, h = self.add_rms_norm(x, attended, layer.mlp_norm)
        return x, self.rms_norm(self.mlp(layer.mlp, h), layer.post_mlp_norm)

    def activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.gelu_tanh_and_multiply(gate_up)

    def load_layer(self, index: int, prefix: str) -> Layer:
        attention, post_attention, mlp, post_mlp = (
            self.load_norm(f"{prefix}.{name}.weight") for name in LAYER_NORM_NAMES
        )
        return Layer(
            attention_norm=attention,
            attention=self.load_attention(index, prefix),
            post_attention_norm=post_attention,
            mlp_norm=mlp,
            mlp=self.load_mlp(index, prefix),
            post_mlp_norm=post_mlp,
        )

    def load_norm(self, name: str) -> torch.Tensor:
        """1 + weight in float32. GGUF files store the sum."""
        weight = self._weights.tensor(name, torch.float32, self.device)
        return weight if self._weights.container == "gguf" else weight + 1.0
