"""The decoder of Phi-3: fused matrices, with the rows of partly rotated heads permuted."""

from __future__ import annotations

import torch

from plait.kernels.quantized_weights import StackedWeight, select_outputs
from plait.runtime.models.decoder import Decoder
from plait.runtime.models.layers import MLP, MoE, Projection
from plait.runtime.models.rope import partial_rotary_permutation


class Phi3Decoder(Decoder):
    """The decoder whose q/k/v and gate/up are stored as one matrix each."""

    def load_qkv(self, prefix: str) -> Projection:
        config = self.config
        projection = self.load_projection(f"{prefix}.qkv_proj")
        if config.effective_rotary_dim == config.head_dim:
            return projection
        rotated_heads = config.num_heads + config.num_kv_heads
        rows = torch.arange((rotated_heads + config.num_kv_heads) * config.head_dim, device=self.device)
        rows = rows.view(-1, config.head_dim)  # [H + 2 G, D]
        order = torch.tensor(
            partial_rotary_permutation(config.effective_rotary_dim, config.head_dim), device=self.device
        )
        rows[:rotated_heads] = rows[:rotated_heads, order]
        assert not isinstance(projection.weight, StackedWeight)  # it is one matrix of the file
        return projection._replace(weight=select_outputs(projection.weight, rows.flatten()))

    def load_mlp(self, index: int, prefix: str) -> MLP | MoE:
        return MLP(
            gate_up=self.load_projection(f"{prefix}.mlp.gate_up_proj"),
            down=self.load_projection(f"{prefix}.mlp.down_proj"),
        )
