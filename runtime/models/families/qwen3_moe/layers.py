"""The decoder of Qwen 3 with a mixture of experts in place of the MLP."""

from __future__ import annotations

import torch

from plait.runtime.models.decoder import MLP, Decoder, MoE


class Qwen3MoeDecoder(Decoder):
    """The decoder whose layers have experts or an MLP, as the config says."""

    def load_mlp(self, index: int, prefix: str) -> MLP | MoE:
        experts = self.config.experts
        if experts is None or not experts.layers[index]:
            return super().load_mlp(index, prefix)
        gate_up = [self.load_tensor(f"{prefix}.mlp.experts.{name}_proj.weight") for name in ("gate", "up")]
        return MoE(
            router=self.load_tensor(f"{prefix}.mlp.gate.weight"),
            gate_up=torch.cat(gate_up, dim=1),
            down=self.load_tensor(f"{prefix}.mlp.experts.down_proj.weight"),
        )
