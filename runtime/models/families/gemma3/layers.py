"""Gemma 3's layers: norms before and after attention and MLP, scaled embeddings, a gate that is a GELU.

Knows: how the layer is put together. Must not know: files, configs' fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.kernels.operators import Kernels
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.runtime.config import WeightFormat
from plait.runtime.errors import InputError
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.decoder import CosSin, Decoder, Layer
from plait.runtime.models.families.gemma3.config import LAYER_NORM_NAMES


class Gemma3Decoder(Decoder):
    """The decoder with four norms to a layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Checkpoint,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] = lambda share: None,
        weight_format: WeightFormat = "bf16",
    ) -> None:
        if dtype == torch.float16:
            raise InputError("Gemma 3's activations do not fit float16; take bfloat16 or float32")
        super().__init__(config, weights, kernels, dtype, device, progress, weight_format)
        # The model was trained with the factor rounded to its dtype.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * self.embedding_scale

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
        first, second, third, fourth = (self.load_norm(f"{prefix}.{name}.weight") for name in LAYER_NORM_NAMES)
        return Layer(
            attention_norm=first,
            attention=self.load_attention(index, prefix),
            post_attention_norm=second,
            mlp_norm=third,
            mlp=self.load_mlp(index, prefix),
            post_mlp_norm=fourth,
        )

    def load_norm(self, name: str) -> torch.Tensor:
        """1 + weight in float32; GGUF files hold the sum already."""
        weight = self._weights.tensor(name, torch.float32, self.device)
        return weight if self._weights.container == "gguf" else weight + 1.0
