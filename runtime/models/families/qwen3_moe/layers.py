"""Qwen 3's layers with experts in the place of the MLP.

Knows: how experts are loaded. Must not know: files, configs' fields.
"""

from __future__ import annotations

import torch

from plait.runtime.models.decoder import MLP, Decoder, MoE


class Qwen3MoeDecoder(Decoder):
    """Layers that have experts load those; the others are Qwen 3's."""

    def load_mlp(self, index: int, prefix: str) -> MLP | MoE:
        settings = self.config.experts
        if settings is None or not settings.layers[index]:
            return super().load_mlp(index, prefix)
        gate_up = [self.load_tensor(f"{prefix}.mlp.experts.{name}_proj.weight") for name in ("gate", "up")]
        return MoE(
            router=self.load_tensor(f"{prefix}.mlp.gate.weight"),
            gate_up=torch.cat(gate_up, dim=1),
            down=self.load_tensor(f"{prefix}.mlp.experts.down_proj.weight"),
        )
