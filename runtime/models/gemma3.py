"""Gemma 3, text: five layers with a sliding window to one without, each kind with its rotary base (arXiv:2503.19786).

Its norms multiply by 1 + weight, and stand before and after both attention and MLP; embeddings are scaled, queries
and keys normed, and the gate is a GELU.
Knows: its config's fields. Must not know: files, tensors; see gemma3_decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checks import MOST, flag, real, whole
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import Family
from plait.runtime.models.shapes import attention_shapes, head_norm_shapes, mlp_shapes, norm_shapes
from plait.runtime.models.source import Shapes

LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
LOCAL_THETA = 10_000.0
PATTERN = 6  # every sixth layer sees everything


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
    hf_base="Gemma3TextModel",
    gguf="gemma3",
    read_hf=read_hf,
    read_gguf=read_gguf,
    layer_shapes=layer_shapes,
    gguf_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
