"""Gemma 3, text only (arXiv:2503.19786).

By default five layers with a sliding window are followed by one without; each kind has its own rotary base. Norms
multiply by 1 + weight and stand before and after both attention and MLP. Embeddings are scaled, queries and keys are
normed, and the activation of the MLP is GELU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import Fields, ModelConfig
from plait.runtime.models.family import ModelFamily, PackedLayer
from plait.runtime.models.value_checks import MAX_VALUES, checked_float, checked_int
from plait.runtime.models.weight_shapes import attention_shapes, mlp_shapes, norm_shapes, qk_norm_shapes

LAYER_NORM_NAMES = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
DEFAULT_SLIDING_ROPE_THETA = 10_000.0
DEFAULT_SLIDING_PATTERN = 6  # every sixth layer has full attention


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    _reject_unsupported_fields(config)
    rope = hf_config.rope_parameters(config)
    full_rope, local_theta = _full_and_sliding_rope(rope, config)
    fields = hf_config.common_fields(
        {"head_dim": 256, "tie_word_embeddings": True, **config},
        rope={"rope_theta": 1_000_000.0, **full_rope},
        activation=ACTIVATION,
        full_rotary=False,
    )
    pattern = checked_int(
        "sliding_window_pattern",
        config.get("sliding_window_pattern", DEFAULT_SLIDING_PATTERN),
        MAX_VALUES["num_layers"],
    )
    scalar = checked_float("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), 0.0, 1e9)
    return dict(
        **fields,
        **hf_config.attention_biases(config),
        sliding_window=checked_int("sliding_window", config.get("sliding_window", 4096), MAX_VALUES["context_length"]),
        sliding_layers=hf_config.layer_types(config, fields["num_layers"], lambda i: (i + 1) % pattern != 0),
        sliding_rope_theta=local_theta,
        attention_scale=scalar**-0.5,
        embedding_scale=fields["hidden_size"] ** 0.5,
    )


def _reject_unsupported_fields(config: Mapping[str, Any]) -> None:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UnsupportedModel(f"Gemma 3 with {name} is not supported")


def _full_and_sliding_rope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """(rotary parameters of the layers with full attention, rotary base of the others)"""
    nested = [rope.get(kind) for kind in ("full_attention", "sliding_attention")]
    if nested == [None, None]:  # the format of transformers 4
        theta = config.get("rope_theta", 1_000_000.0)
        return {"rope_theta": theta, **rope}, config.get("rope_local_base_freq", DEFAULT_SLIDING_ROPE_THETA)
    full, local = nested
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise CorruptModel("rope_parameters in config.json does not name both kinds of layers")
    if hf_config.rope_scaling(local, config) is not None:
        raise UnsupportedModel("rope scaling in the layers with a sliding window is not supported")
    return full, local.get("rope_theta", DEFAULT_SLIDING_ROPE_THETA)


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    if fields["sliding_window"] is None:
        raise CorruptModel("the file does not name gemma3.attention.sliding_window")
    num_layers, width = fields["num_layers"], fields["hidden_size"] / fields["num_heads"]
    # The file does not state the attention scale. It is 1 / sqrt(head_dim) except in the 27B, which has 62 layers.
    scalar = width if num_layers == 62 else fields["head_dim"]
    fields["rope_theta"] = keys.get("rope.freq_base", 1_000_000.0)
    return dict(
        **fields,
        sliding_layers=_gguf_sliding_layers(keys, num_layers),
        sliding_rope_theta=keys.get("rope.freq_base_swa", DEFAULT_SLIDING_ROPE_THETA),
        attention_scale=keys.get("attention.scale", 1.0 / math.sqrt(scalar)),
        embedding_scale=fields["hidden_size"] ** 0.5,
    )


def _gguf_sliding_layers(keys: gguf_config.GGUFKeys, num_layers: int) -> tuple[bool, ...]:
    """Which layers have a window. The file has a list with one entry per layer, or the period of layers without one."""
    pattern = keys.metadata.get(f"{keys.prefix}attention.sliding_window_pattern", DEFAULT_SLIDING_PATTERN)
    if hasattr(pattern, "tolist"):
        return tuple(bool(is_sliding) for is_sliding in pattern.tolist())
    step = checked_int("attention.sliding_window_pattern", pattern, MAX_VALUES["num_layers"])
    return tuple((i + 1) % step != 0 for i in range(num_layers))


def layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    return (
        norm_shapes(config, *LAYER_NORM_NAMES) | attention_shapes(config) | qk_norm_shapes(config) | mlp_shapes(config)
    )


FAMILY = ModelFamily(
    name="gemma3",
    hf_architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    gguf_architecture="gemma3",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=layer_shapes,
    decoder="plait.runtime.models.families.gemma3.layers:Gemma3Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=False,
    gguf_layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    layer_norms=LAYER_NORM_NAMES,
    packed_layer=PackedLayer("gelu", unit_norms=True),
)
