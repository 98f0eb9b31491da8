"""The Llama family: Llama 1 to 3, SmolLM2, Mistral, and what else has their shape.

Knows: its weights and the order of operators. Must not know: batching, pages beyond the layout, sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plait.kernels.layout import AttentionLayout
from plait.kernels.select import Kernels
from plait.runtime.models.config import ModelConfig
from plait.runtime.weights.checkpoint import Checkpoint

Projection = tuple[torch.Tensor, torch.Tensor | None]  # weight [out, in], bias [out] or None


@dataclass(frozen=True)
class Layer:
    """One decoder block. q, k, v are one projection, gate and up another."""

    attention_norm: torch.Tensor
    qkv: Projection
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class LlamaModel:
    """Weights and forward pass. `forward` takes any ragged batch; `logits` only the rows asked for."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Checkpoint,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.config, self.kernels = config, kernels
        self._weights, self._names, self._dtype, self._device = weights, set(weights.names()), dtype, device
        self.embedding = self._get("model.embed_tokens.weight")  # [V, C]
        self.layers = []
        for index in range(config.num_layers):
            self.layers.append(self._layer(f"model.layers.{index}"))
            progress((index + 1) / config.num_layers)
        self.norm = self._get("model.norm.weight")
        self.head = self.embedding if config.tie_word_embeddings else self._get("lm_head.weight")
        self.cos, self.sin = self._rotary_tables()

    def forward(self, token_ids: torch.Tensor, layout: AttentionLayout, kv_cache: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, C] of token_ids [T], after the last norm. Writes KV into kv_cache [layers, 2, P, G, D]."""
        config, kernels = self.config, self.kernels
        heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = self.cos[layout.positions], self.sin[layout.positions]  # [T, D // 2]
        x = self.embedding[token_ids]  # [T, C]
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            h = kernels.rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            qkv = kernels.linear(h, *layer.qkv).view(len(x), heads + 2 * groups, size)  # [T, H + 2 G, D]
            qk = kernels.rotary(qkv[:, : heads + groups], cos, sin)
            kernels.write_kv(qk[:, heads:], qkv[:, heads + groups :], cache[0], cache[1], layout.write_pages)
            attended = kernels.paged_attention(
                qk[:, :heads], cache[0], cache[1], layout, size**-0.5, config.sliding_window
            )  # [T, H, D]
            x = x + kernels.linear(attended.reshape(len(x), heads * size), *layer.output)
            h = kernels.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            x = x + kernels.linear(kernels.silu_and_multiply(kernels.linear(h, *layer.gate_up)), *layer.down)
        return kernels.rms_norm(x, self.norm, config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """[n, V] float32 for hidden [n, C]; with `columns` [k] only those tokens' logits, [n, k]."""
        head = self.head if columns is None else self.head[columns]
        return self.kernels.linear(hidden, head, None).float()

    # -- loading ----------------------------------------------------------------------------------

    def _get(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, self._dtype, self._device)

    def _layer(self, prefix: str) -> Layer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self._get(f"{prefix}.input_layernorm.weight"),
            qkv=self._projection(*(f"{attention}.{part}_proj" for part in "qkv")),
            output=self._projection(f"{attention}.o_proj"),
            mlp_norm=self._get(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._projection(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._projection(f"{mlp}.down_proj"),
        )

    def _projection(self, *names: str) -> Projection:
        """The named linear layers as one, their outputs side by side."""
        weights = [self._get(f"{name}.weight") for name in names]
        biases = [self._get(f"{name}.bias") for name in names if f"{name}.bias" in self._names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return weight, torch.cat(biases) if biases else None

    def _rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [context, D // 2] float32."""
        frequencies = torch.tensor(self.config.inverse_frequencies(), dtype=torch.float32)
        angles = torch.outer(torch.arange(self.config.context_length, dtype=torch.float32), frequencies)
        return angles.cos().to(self._device), angles.sin().to(self._device)
