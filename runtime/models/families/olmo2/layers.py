"""The decoder of OLMo 2: norms in float32."""

from __future__ import annotations

import torch

from plait.runtime.models.decoder import Decoder


class Olmo2Decoder(Decoder):
    """The decoder whose norms multiply by their weight before they round to the model's dtype."""

    def load_norm(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, torch.float32, self.device)
