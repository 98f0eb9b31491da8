"""A decoder-only transformer in the small pieces that families share, and the loop over its layers.

A family that differs overrides the piece that differs: how a layer is loaded, how a block is put together, how
the MLP works. Nothing here asks a tensor for its value, so a forward can be captured into a CUDA graph.
Knows: weights and the order of operators. Must not know: batching, pages beyond the layout, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.quantized import Matrix
from plait.kernels.select import Kernels
from plait.runtime.config import WeightForm
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.held import HeldWeights
from plait.runtime.models.source import Checkpoint

Projection = tuple[Matrix, torch.Tensor | None]  # weight [out, in], bias [out] or None
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, D // 2] float32


@dataclass(frozen=True)
class Attention:
    """q, k and v are one projection. `head_norm` [H + G, D]: a weight for each query and key head, or None."""

    qkv: Projection
    output: Projection
    head_norm: torch.Tensor | None
    window: int | None
    rotation: int  # which of the model's rotary tables


@dataclass(frozen=True)
class MLP:
    """gate and up are one projection."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class Experts:
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
    mlp: MLP | Experts
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
        form: WeightForm = "bf16",
    ) -> None:
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        self._weights, self._names = weights, set(weights.names())
        self._held = HeldWeights(weights, form, dtype, device)
        tied = config.tie_word_embeddings
        self.embedding = (self._held.head if tied else self._held.table)("model.embed_tokens.weight")  # [V, C]
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(self.load_layer(index, f"model.layers.{index}"))
            progress((index + 1) / config.num_layers)
        self.norm = self.load_norm("model.norm.weight")
        self.head = self.embedding if tied else self._held.head("lm_head.weight")
        self.rotations = rotary_tables(config, device)

    def forward(self, token_ids: torch.Tensor, layout: AttentionLayout, kv_cache: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states [T, C] of token_ids [T], after the last norm. Writes KV into kv_cache, one for each layer."""
        turned = self.rotations  # whole tables, which fused operators look positions up in
        if self.kernels.fused is None:
            turned = [(cos[layout.positions], sin[layout.positions]) for cos, sin in self.rotations]
        x, added = self.embed(token_ids), None
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x, added = self.block(layer, x, added, turned, cache, layout)
        return self.add_normed(x, added, self.norm)[1]

    def logits(self, hidden: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """[n, V] float32 for hidden [n, C]; with `columns` [k] only those tokens' logits, [n, k]."""
        head = self.head if columns is None else self.kernels.rows_of(self.head, columns, self.dtype)
        return self.kernels.linear(hidden, head, None).float()

    # -- pieces -----------------------------------------------------------------------------------

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, C]"""
        return self.kernels.rows_of(self.embedding, token_ids, self.dtype)

    def block(
        self,
        layer: Layer,
        x: torch.Tensor,
        added: torch.Tensor | None,
        turned: Sequence[Rotation],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over x + added (both [T, C]), and again the sum in two parts: it is taken with the next norm."""
        x, h = self.add_normed(x, added, layer.attention_norm)
        x, h = self.add_normed(x, self.attend(layer.attention, h, turned, cache, layout), layer.mlp_norm)
        return x, self.feed(layer.mlp, h)

    def add_normed(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + added [T, C], which may take x's place, and its norm."""
        if added is not None and self.kernels.fused is not None:
            return x, self.kernels.fused.add_norm(added, x, weight, self.config.rms_norm_eps)
        x = x if added is None else x + added
        return x, self.normed(x, weight)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, C] through a norm."""
        return self.kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def attend(
        self,
        attention: Attention,
        h: torch.Tensor,
        turned: Sequence[Rotation],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> torch.Tensor:
        """Attention of h [T, C] with its projections, [T, C]; the cache is written before it is read."""
        config, kernels = self.config, self.kernels
        heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = kernels.linear(h, *attention.qkv).view(len(h), heads + 2 * groups, size)  # [T, H + 2 G, D]
        if kernels.fused is not None:
            cos, sin = turned[attention.rotation]
            weight, eps = attention.head_norm, config.rms_norm_eps
            attended = kernels.fused.attend(
                qkv, cos, sin, cache, layout, config.score_scale, attention.window, weight, eps
            )
            return kernels.linear(attended.view(len(h), heads * size), *attention.output)
        qk = qkv[:, : heads + groups]
        if attention.head_norm is not None:
            qk = kernels.head_norm(qk, attention.head_norm, config.rms_norm_eps)
        qk = kernels.rotary(qk, *turned[attention.rotation])
        kernels.write_kv(qk[:, heads:], qkv[:, heads + groups :], cache[0], cache[1], layout.write_pages)
        attended = kernels.paged_attention(
            qk[:, :heads], cache[0], cache[1], layout, config.score_scale, attention.window
        )  # [T, H, D]
        return kernels.linear(attended.reshape(len(h), heads * size), *attention.output)

    def feed(self, mlp: MLP | Experts, h: torch.Tensor) -> torch.Tensor:
        """The MLP over h [T, C]."""
        if isinstance(mlp, Experts):
            return self.route(mlp, h)
        return self.kernels.linear(self.activate(self.kernels.linear(h, *mlp.gate_up)), *mlp.down)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 F] -> [T, F]"""
        return self.kernels.silu_and_multiply(gate_up)

    def route(self, experts: Experts, h: torch.Tensor) -> torch.Tensor:
        """Each row of h [T, C] through its experts, the answers weighted by the router's softmax; [T, C]."""
        settings = self.config.experts
        assert settings is not None
        scores = self.kernels.linear(h, experts.router, None).float().softmax(-1)  # [T, E]
        weights, chosen = scores.topk(settings.per_token, dim=-1)  # [T, K]
        if settings.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.kernels.experts(h, weights, chosen, experts.gate_up, experts.down)

    # -- loading ----------------------------------------------------------------------------------

    def get(self, name: str) -> torch.Tensor:
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
        return self.get(name)

    def load_attention(self, index: int, prefix: str) -> Attention:
        config = self.config
        return Attention(
            qkv=self.load_qkv(f"{prefix}.self_attn"),
            output=self.load_projection(f"{prefix}.self_attn.o_proj"),
            head_norm=self._head_norm(f"{prefix}.self_attn"),
            window=config.window(index),
            rotation=int(config.is_local(index) and config.local_rope_theta is not None),
        )

    def load_qkv(self, prefix: str) -> Projection:
        return self.load_projection(*(f"{prefix}.{part}_proj" for part in "qkv"))

    def load_mlp(self, index: int, prefix: str) -> MLP | Experts:
        return MLP(
            gate_up=self.load_projection(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            down=self.load_projection(f"{prefix}.mlp.down_proj"),
        )

    def load_projection(self, *names: str) -> Projection:
        """The named linear layers as one, their outputs side by side."""
        biases = [self.get(f"{name}.bias") for name in names if f"{name}.bias" in self._names]
        weight = self._held.matrix(*(f"{name}.weight" for name in names))
        return weight, torch.cat(biases) if biases else None

    def _head_norm(self, prefix: str) -> torch.Tensor | None:
        """[H + G, D]"""
        if f"{prefix}.q_norm.weight" not in self._names:
            return None
        query, key = (self.load_norm(f"{prefix}.{part}_norm.weight") for part in "qk")
        return torch.stack([query] * self.config.num_heads + [key] * self.config.num_kv_heads)


def rotary_tables(config: ModelConfig, device: torch.device) -> list[Rotation]:
    """cos and sin [context, D // 2] float32 of the model, and of its local layers if theirs are others."""
    magnitude = config.rope_scaling.magnitude if config.rope_scaling else 1.0
    tables = [_rotary_table(config, config.inverse_frequencies(), magnitude, device)]
    if config.local_rope_theta is not None:
        tables.append(_rotary_table(config, config.local_frequencies(), 1.0, device))
    return tables


def _rotary_table(
    config: ModelConfig, frequencies: Sequence[float], magnitude: float, device: torch.device
) -> Rotation:
    angles = torch.outer(
        torch.arange(config.context_length, dtype=torch.float32),
        torch.tensor(frequencies, dtype=torch.float32),
    )
    still = (0, config.head_dim // 2 - len(frequencies))  # pairs that do not turn: angle 0
    cos = torch.nn.functional.pad(angles.cos() * magnitude, still, value=1.0)
    sin = torch.nn.functional.pad(angles.sin() * magnitude, still, value=0.0)
    return cos.to(device), sin.to(device)
