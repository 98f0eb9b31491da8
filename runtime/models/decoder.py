"""A decoder-only transformer in the small pieces that families share, and the loop over its layers.

A family that differs overrides the piece that differs: how a layer is loaded, how a block is put together, how
the MLP works. Nothing here asks a tensor for its value, so a forward can be captured into a CUDA graph.
Knows: weights and the order of operators. Must not know: batching, pages beyond the layout, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from plait.kernels.operators import Kernels
from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.quantized_weights import LinearWeight
from plait.runtime.config import WeightFormat
from plait.runtime.models.checkpoint_interface import Checkpoint
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.loading.torch_weights import TorchWeightLoader

Projection = tuple[LinearWeight, torch.Tensor | None]  # weight [out, in], bias [out] or None
CosSin = tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, D // 2] float32


@dataclass(frozen=True)
class Attention:
    """q, k and v are one projection. `head_norm` [H + G, D]: a weight for each query and key head, or None."""

    qkv: Projection
    output: Projection
    head_norm: torch.Tensor | None
    window: int | None
    rope_table: int  # which of the model's rotary tables


@dataclass(frozen=True)
class MLP:
    """gate and up are one projection."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class MoE:
    """E MLPs and what chooses among them."""

    router: torch.Tensor  # [E, C]
    gate_up: torch.Tensor  # [E, 2 F, C]
    down: torch.Tensor  # [E, C, F]


@dataclass(frozen=True)
class Layer:
    """One decoder block. The two `post` norms are Gemma's: they stand after attention and MLP, before the sum."""

    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: MLP | MoE
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None


class Decoder:
    """Weights and forward pass. `forward` takes any ragged batch; `logits` only the rows asked for."""

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
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        self._weights, self._names = weights, set(weights.names())
        self._loader = TorchWeightLoader(weights, weight_format, dtype, device)
        tied = config.tie_word_embeddings
        self.embedding = (self._loader.head if tied else self._loader.load_embedding)(
            "model.embed_tokens.weight"
        )  # [V, C]
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(self.load_layer(index, f"model.layers.{index}"))
            progress((index + 1) / config.num_layers)
        self.norm = self.load_norm("model.norm.weight")
        self.head = self.embedding if tied else self._loader.head("lm_head.weight")
        self.rope_tables = build_rope_tables(config, device)

    def forward(self, token_ids: torch.Tensor, layout: AttentionLayout, kv_cache: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states [T, C] of token_ids [T], after the last norm. Writes KV into kv_cache, one for each layer."""
        cos_sin = self.rope_tables  # whole tables, which fused operators look positions up in
        if self.kernels.fused is None:
            cos_sin = [(cos[layout.positions], sin[layout.positions]) for cos, sin in self.rope_tables]
        x, delta = self.embed(token_ids), None
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x, delta = self.layer_forward(layer, x, delta, cos_sin, cache, layout)
        return self.add_rms_norm(x, delta, self.norm)[1]

    def logits(self, hidden: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """[n, V] float32 for hidden [n, C]; with `columns` [k] only those tokens' logits, [n, k]."""
        head = self.head if columns is None else self.kernels.dequantize_rows(self.head, columns, self.dtype)
        return self.kernels.linear(hidden, head, None).float()

    # -- pieces -----------------------------------------------------------------------------------

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, C]"""
        return self.kernels.dequantize_rows(self.embedding, token_ids, self.dtype)

    def layer_forward(
        self,
        layer: Layer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos_sin: Sequence[CosSin],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over x + added (both [T, C]), and again the sum in two parts: it is taken with the next norm."""
        x, h = self.add_rms_norm(x, delta, layer.attention_norm)
        x, h = self.add_rms_norm(x, self.attend(layer.attention, h, cos_sin, cache, layout), layer.mlp_norm)
        return x, self.mlp(layer.mlp, h)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + added [T, C], which may take x's place, and its norm."""
        if delta is not None and self.kernels.fused is not None:
            return x, self.kernels.fused.add_rms_norm(delta, x, weight, self.config.rms_norm_eps)
        x = x if delta is None else x + delta
        return x, self.rms_norm(x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, C] through a norm."""
        return self.kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def attend(
        self,
        attention: Attention,
        h: torch.Tensor,
        cos_sin: Sequence[CosSin],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> torch.Tensor:
        """Attention of h [T, C] with its projections, [T, C]; the cache is written before it is read."""
        config, kernels = self.config, self.kernels
        heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = kernels.linear(h, *attention.qkv).view(len(h), heads + 2 * groups, size)  # [T, H + 2 G, D]
        if kernels.fused is not None:
            cos, sin = cos_sin[attention.rope_table]
            weight, eps = attention.head_norm, config.rms_norm_eps
            attended = kernels.fused.attend(
                qkv, cos, sin, cache, layout, config.softmax_scale, attention.window, weight, eps
            )
            return kernels.linear(attended.view(len(h), heads * size), *attention.output)
        qk = qkv[:, : heads + groups]
        if attention.head_norm is not None:
            qk = kernels.head_norm(qk, attention.head_norm, config.rms_norm_eps)
        qk = kernels.rotary(qk, *cos_sin[attention.rope_table])
        kernels.write_kv(qk[:, heads:], qkv[:, heads + groups :], cache[0], cache[1], layout.write_slots)
        attended = kernels.paged_attention(
            qk[:, :heads], cache[0], cache[1], layout, config.softmax_scale, attention.window
        )  # [T, H, D]
        return kernels.linear(attended.reshape(len(h), heads * size), *attention.output)

    def mlp(self, mlp: MLP | MoE, h: torch.Tensor) -> torch.Tensor:
        """The MLP over h [T, C]."""
        if isinstance(mlp, MoE):
            return self.moe(mlp, h)
        return self.kernels.linear(self.activation(self.kernels.linear(h, *mlp.gate_up)), *mlp.down)

    def activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 F] -> [T, F]"""
        return self.kernels.silu_and_multiply(gate_up)

    def moe(self, experts: MoE, h: torch.Tensor) -> torch.Tensor:
        """Each row of h [T, C] through its experts, the answers weighted by the router's softmax; [T, C]."""
        settings = self.config.experts
        assert settings is not None
        scores = self.kernels.linear(h, experts.router, None).float().softmax(-1)  # [T, E]
        weights, chosen = scores.topk(settings.experts_per_token, dim=-1)  # [T, K]
        if settings.normalize_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.kernels.experts(h, weights, chosen, experts.gate_up, experts.down)

    # -- loading ----------------------------------------------------------------------------------

    def load_tensor(self, name: str) -> torch.Tensor:
        """The named weight in the model's dtype, on its device."""
        return self._weights.tensor(name, self.dtype, self.device)

    def load_layer(self, index: int, prefix: str) -> Layer:
        """Layer `index`, whose weights' names begin with `prefix`."""
        return Layer(
            attention_norm=self.load_norm(f"{prefix}.input_layernorm.weight"),
            attention=self.load_attention(index, prefix),
            mlp_norm=self.load_norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self.load_mlp(index, prefix),
        )

    def load_norm(self, name: str) -> torch.Tensor:
        """What a norm multiplies by."""
        return self.load_tensor(name)

    def load_attention(self, index: int, prefix: str) -> Attention:
        config = self.config
        return Attention(
            qkv=self.load_qkv(f"{prefix}.self_attn"),
            output=self.load_projection(f"{prefix}.self_attn.o_proj"),
            head_norm=self._head_norm(f"{prefix}.self_attn"),
            window=config.window(index),
            rope_table=int(config.is_sliding(index) and config.sliding_rope_theta is not None),
        )

    def load_qkv(self, prefix: str) -> Projection:
        return self.load_projection(*(f"{prefix}.{part}_proj" for part in "qkv"))

    def load_mlp(self, index: int, prefix: str) -> MLP | MoE:
        return MLP(
            gate_up=self.load_projection(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            down=self.load_projection(f"{prefix}.mlp.down_proj"),
        )

    def load_projection(self, *names: str) -> Projection:
        """The named linear layers as one, their outputs side by side."""
        biases = [self.load_tensor(f"{name}.bias") for name in names if f"{name}.bias" in self._names]
        weight = self._loader.load_matrix(*(f"{name}.weight" for name in names))
        return weight, torch.cat(biases) if biases else None

    def _head_norm(self, prefix: str) -> torch.Tensor | None:
        """[H + G, D]"""
        if f"{prefix}.q_norm.weight" not in self._names:
            return None
        query, key = (self.load_norm(f"{prefix}.{part}_norm.weight") for part in "qk")
        return torch.stack([query] * self.config.num_heads + [key] * self.config.num_kv_heads)


def build_rope_tables(config: ModelConfig, device: torch.device) -> list[CosSin]:
    """cos and sin [context, D // 2] float32 of the model, and of its local layers if theirs are others."""
    attention_factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    tables = [_build_rope_table(config, config.inverse_frequencies(), attention_factor, device)]
    if config.sliding_rope_theta is not None:
        tables.append(_build_rope_table(config, config.sliding_inverse_frequencies(), 1.0, device))
    return tables


def _build_rope_table(
    config: ModelConfig, frequencies: Sequence[float], attention_factor: float, device: torch.device
) -> CosSin:
    angles = torch.outer(
        torch.arange(config.context_length, dtype=torch.float32),
        torch.tensor(frequencies, dtype=torch.float32),
    )
    still = (0, config.head_dim // 2 - len(frequencies))  # pairs that do not turn: angle 0
    cos = torch.nn.functional.pad(angles.cos() * attention_factor, still, value=1.0)
    sin = torch.nn.functional.pad(angles.sin() * attention_factor, still, value=0.0)
    return cos.to(device), sin.to(device)
