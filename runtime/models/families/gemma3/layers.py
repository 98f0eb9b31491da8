"""The decoder of Gemma 2 and 3: norms in float32, scaled embeddings, GELU."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch

from plait.runtime.models.decoder import Decoder


class Gemma3Decoder(Decoder):
    """The decoder whose norms multiply by 1 + weight."""

    supports_float16: ClassVar[bool] = False

    @cached_property
    def embedding_scale(self) -> float:
        """sqrt(hidden_size), rounded to the dtype as in training."""
        return torch.tensor(self.config.embedding_scale).to(self.dtype).item()

    def activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.gelu_tanh_and_multiply(gate_up)

    def load_norm(self, name: str) -> torch.Tensor:
        """1 + weight in float32. GGUF files store the sum."""
        weight = self._weights.tensor(name, torch.float32, self.device)
        return weight if self._weights.container == "gguf" else weight + 1.0
