"""Phi-3's layers: the plain decoder's, loaded from fused matrices whose rotary pairs are put apart.

Knows: how it fuses. Must not know: files, configs' fields.
"""

from __future__ import annotations

import torch

from plait.kernels.quantized import take_rows
from plait.runtime.models.decoder import MLP, Decoder, Experts, Projection
from plait.runtime.models.phi3 import pairs_apart


class Phi3Model(Decoder):
    """The plain decoder with two fused matrices."""

    def load_qkv(self, prefix: str) -> Projection:
        config = self.config
        weight, bias = self.load_projection(f"{prefix}.qkv_proj")
        if config.num_rotary == config.head_dim:
            return weight, bias
        turning = config.num_heads + config.num_kv_heads
        rows = torch.arange((turning + config.num_kv_heads) * config.head_dim, device=self.device)
        rows = rows.view(-1, config.head_dim)  # [H + 2 G, D]
        order = torch.tensor(pairs_apart(config.num_rotary, config.head_dim), device=self.device)
        rows[:turning] = rows[:turning, order]
        return take_rows(weight, rows.flatten()), bias

    def load_mlp(self, index: int, prefix: str) -> MLP | Experts:
        return MLP(
            gate_up=self.load_projection(f"{prefix}.mlp.gate_up_proj"),
            down=self.load_projection(f"{prefix}.mlp.down_proj"),
        )
