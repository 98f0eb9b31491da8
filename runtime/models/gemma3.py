"""Gemma 3, text: five layers with a sliding window to one without, each kind with its rotary base (arXiv:2503.19786).

Its norms multiply by 1 + weight, and stand before and after both attention and MLP; embeddings are scaled, queries
and keys normed, and the gate is a GELU.
Knows: its config's fields, its layer. Must not know: files, batching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.kernels.kv_cache import LayerCache
from plait.kernels.layout import AttentionLayout
from plait.kernels.select import Kernels
from plait.runtime.errors import CorruptModel, InputError, UnsupportedModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checks import MOST, flag, real, whole
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.decoder import Decoder, Layer, Rotation
from plait.runtime.models.family import Family
from plait.runtime.models.shapes import attention_shapes, head_norm_shapes, mlp_shapes, norm_shapes
from plait.runtime.models.source import Checkpoint, Shapes

LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
LOCAL_THETA = 10_000.0
PATTERN = 6  # every sixth layer sees everything


class Gemma3Model(Decoder):
    """The decoder with four norms to a layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Checkpoint,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        if dtype == torch.float16:
            raise InputError("Gemma 3's activations do not fit float16; take bfloat16 or float32")
        super().__init__(config, weights, kernels, dtype, device, progress)
        # The model was trained with the factor rounded to its dtype.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5).to(dtype).item()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids] * self.embedding_scale

    def block(
        self,
        layer: Layer,
        x: torch.Tensor,
        added: torch.Tensor | None,
        turned: Sequence[Rotation],
        cache: LayerCache,
        layout: AttentionLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer.post_attention_norm is not None
        assert layer.post_mlp_norm is not None
        x, h = self.add_normed(x, added, layer.attention_norm)
        attended = self.normed(self.attend(layer.attention, h, turned, cache, layout), layer.post_attention_norm)
        x, h = self.add_normed(x, attended, layer.mlp_norm)
        return x, self.normed(self.feed(layer.mlp, h), layer.post_mlp_norm)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.gelu_tanh_and_multiply(gate_up)

    def load_layer(self, index: int, prefix: str) -> Layer:
        first, second, third, fourth = (self.load_norm(f"{prefix}.{name}.weight") for name in LAYER_NORMS)
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


def read_hf(config: Mapping[str, Any]) -> ModelConfig:
    _refuse_variants(config)
    rope = hf_config.rope_parameters(config)
    whole_rope, local_theta = _ropes(rope, config)
    fields = hf_config.common_fields(
        {"head_dim": 256, "tie_word_embeddings": True, **config}, rope={"rope_theta": 1_000_000.0, **whole_rope}
    )
    pattern = whole("sliding_window_pattern", config.get("sliding_window_pattern", PATTERN), MOST["num_layers"])
    bias = flag("attention_bias", config.get("attention_bias", False))
    scalar = real("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), 0.0, 1e9)
    return ModelConfig(
        architecture="gemma3",
        **fields,
        attention_bias=bias,
        output_bias=bias,
        sliding_window=whole("sliding_window", config.get("sliding_window", 4096), MOST["context_length"]),
        sliding_layers=hf_config.layer_types(config, fields["num_layers"], lambda i: (i + 1) % pattern != 0),
        local_rope_theta=local_theta,
        attention_scale=scalar**-0.5,
    )


def _refuse_variants(config: Mapping[str, Any]) -> None:
    hf_config.require_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UnsupportedModel(f"Gemma 3 with {name} is not supported")


def _ropes(rope: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """(the rotary parameters of layers that see everything, the base of the others)"""
    nested = [rope.get(kind) for kind in ("full_attention", "sliding_attention")]
    if nested == [None, None]:  # as transformers 4 wrote it
        theta = config.get("rope_theta", 1_000_000.0)
        return {"rope_theta": theta, **rope}, config.get("rope_local_base_freq", LOCAL_THETA)
    full, local = nested
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise CorruptModel("rope_parameters in config.json does not name both kinds of layers")
    if hf_config.rope_scaling(local, config) is not None:
        raise UnsupportedModel("rope scaling in the layers with a sliding window is not supported")
    return full, local.get("rope_theta", LOCAL_THETA)


def read_gguf(keys: gguf_config.Keys, facts: gguf_config.TensorFacts) -> ModelConfig:
    fields = gguf_config.common_fields(keys, facts)
    gguf_config.require_whole_rotation(keys, fields["head_dim"])
    if fields["sliding_window"] is None:
        raise CorruptModel("the file does not name gemma3.attention.sliding_window")
    num_layers, width = fields["num_layers"], fields["hidden_size"] / fields["num_heads"]
    # The file does not say by what queries are divided. The 27B divides by another number than its head size.
    scalar = width if num_layers == 62 else fields["head_dim"]
    fields["rope_theta"] = keys.get("rope.freq_base", 1_000_000.0)
    return ModelConfig(
        architecture="gemma3",
        **fields,
        sliding_layers=_gguf_pattern(keys, num_layers),
        local_rope_theta=keys.get("rope.freq_base_swa", LOCAL_THETA),
        attention_scale=keys.get("attention.scale", 1.0 / math.sqrt(scalar)),
    )


def _gguf_pattern(keys: gguf_config.Keys, num_layers: int) -> tuple[bool, ...]:
    """Which layers are local: a list with one entry per layer, or every how many layers one is not."""
    pattern = keys.metadata.get(f"{keys.prefix}attention.sliding_window_pattern", PATTERN)
    if hasattr(pattern, "tolist"):
        return tuple(bool(each) for each in pattern.tolist())
    step = whole("attention.sliding_window_pattern", pattern, MOST["num_layers"])
    return tuple((i + 1) % step != 0 for i in range(num_layers))


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    return norm_shapes(config, *LAYER_NORMS) | attention_shapes(config) | head_norm_shapes(config) | mlp_shapes(config)


FAMILY = Family(
    name="gemma3",
    hf="Gemma3ForCausalLM",
    gguf="gemma3",
    model=Gemma3Model,
    read_hf=read_hf,
    read_gguf=read_gguf,
    layer_shapes=layer_shapes,
    gguf_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
