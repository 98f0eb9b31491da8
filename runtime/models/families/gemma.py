"""Gemma 2 (arXiv:2408.00118) and Gemma 3, text only (arXiv:2503.19786).

Norms multiply by 1 + weight in float32 and stand before and after both attention and MLP. Embeddings are scaled, and
the activation of the MLP is GELU. Gemma 2 has soft caps on attention scores and logits, and a window in every other
layer. In Gemma 3, by default five layers with a sliding window are followed by one without; each kind has its own
rotary base, and queries and keys are normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import LayerForm, ModelFamily
from plait.runtime.models.value_checks import MAX_VALUES, checked_float, checked_int

LAYER = LayerForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    activation="gelu",
    float32_norms=True,
    unit_norms=True,
    rounds_embedding_scale=True,
    overflows_float16=True,
)
GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
DEFAULT_WINDOW, DEFAULT_ATTENTION_CAP, DEFAULT_LOGIT_CAP = 4096, 50.0, 30.0
DEFAULT_ROPE_THETA, DEFAULT_SLIDING_ROPE_THETA = 1_000_000.0, 10_000.0  # of Gemma 3
DEFAULT_SLIDING_PATTERN = 6  # of Gemma 3: every sixth layer has full attention
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _scales_and_window(config: Mapping[str, Any], fields: Fields) -> Fields:
    """What both read alike from config.json, beside the common fields."""
    scalar = checked_float("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), 0.0, 1e9)
    window = config.get("sliding_window", DEFAULT_WINDOW)
    return dict(
        **hf_config.attention_biases(config),
        sliding_window=checked_int("sliding_window", window, MAX_VALUES["context_length"]),
        attention_scale=scalar**-0.5,
        embedding_scale=fields["hidden_size"] ** 0.5,
    )


def _gguf_scales(keys: gguf_config.GGUFKeys, fields: Fields) -> Fields:
    """The file does not state the attention scale. It is 1 / sqrt(head_dim) except in the 27B."""
    is_27b = fields["num_layers"] == LAYERS_OF_27B[keys.prefix[:-1]]
    width = fields["hidden_size"] / fields["num_heads"] if is_27b else fields["head_dim"]
    return dict(attention_scale=keys.get("attention.scale", width**-0.5), embedding_scale=fields["hidden_size"] ** 0.5)


def _is_sliding_in_gemma2(layer: int) -> bool:
    """Whether the layer has a window, unless the config lists the types of layers."""
    return layer % 2 == 0


def _read_gemma2_config(config: Mapping[str, Any]) -> Fields:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("Gemma 2 with use_bidirectional_attention is not supported")
    fields = hf_config.common_fields({"head_dim": 256, "tie_word_embeddings": True, **config}, activation=ACTIVATION)
    return dict(
        **fields,
        **_scales_and_window(config, fields),
        sliding_layers=hf_config.layer_types(config, fields["num_layers"], _is_sliding_in_gemma2),
        attention_softcap=config.get("attn_logit_softcapping", DEFAULT_ATTENTION_CAP) or 0.0,
        logit_softcap=config.get("final_logit_softcapping", DEFAULT_LOGIT_CAP) or 0.0,
    )


def _read_gemma2_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields, has_softcaps=True)
    return dict(
        fields,
        **_gguf_scales(keys, fields),
        sliding_window=fields["sliding_window"] or DEFAULT_WINDOW,
        sliding_layers=tuple(_is_sliding_in_gemma2(i) for i in range(fields["num_layers"])),
        attention_softcap=keys.get("attn_logit_softcapping", DEFAULT_ATTENTION_CAP),
        logit_softcap=keys.get("final_logit_softcapping", DEFAULT_LOGIT_CAP),
    )


GEMMA2 = ModelFamily(
    name="gemma2",
    hf_architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    gguf_architecture="gemma2",
    read_hf_config=_read_gemma2_config,
    read_gguf_config=_read_gemma2_gguf_config,
    gguf_permuted_qk=False,
    gguf_layer_names=GGUF_NAMES,
    layer=LAYER,
)


def _read_gemma3_config(config: Mapping[str, Any]) -> Fields:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UnsupportedModel(f"Gemma 3 with {name} is not supported")
    full_rope, local_theta = _full_and_sliding_rope(hf_config.rope_parameters(config), config)
    fields = hf_config.common_fields(
        {"head_dim": 256, "tie_word_embeddings": True, **config},
        rope={"rope_theta": DEFAULT_ROPE_THETA, **full_rope},
        activation=ACTIVATION,
        full_rotary=False,
    )
    pattern = checked_int(
        "sliding_window_pattern",
        config.get("sliding_window_pattern", DEFAULT_SLIDING_PATTERN),
        MAX_VALUES["num_layers"],
    )
    return dict(
        **fields,
        **_scales_and_window(config, fields),
        sliding_layers=hf_config.layer_types(config, fields["num_layers"], lambda i: (i + 1) % pattern != 0),
        sliding_rope_theta=local_theta,
    )


def _full_and_sliding_rope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """(rotary parameters of the layers with full attention, rotary base of the others)"""
    nested = [rope.get(kind) for kind in ("full_attention", "sliding_attention")]
    if nested == [None, None]:  # the format of transformers 4
        theta = config.get("rope_theta", DEFAULT_ROPE_THETA)
        return {"rope_theta": theta, **rope}, config.get("rope_local_base_freq", DEFAULT_SLIDING_ROPE_THETA)
    full, local = nested
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise CorruptModel("rope_parameters in config.json does not name both kinds of layers")
    if hf_config.rope_scaling(local, config) is not None:
        raise UnsupportedModel("rope scaling in the layers with a sliding window is not supported")
    return full, local.get("rope_theta", DEFAULT_SLIDING_ROPE_THETA)


def _read_gemma3_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    if fields["sliding_window"] is None:
        raise CorruptModel("the file does not name gemma3.attention.sliding_window")
    return dict(
        fields,
        **_gguf_scales(keys, fields),
        rope_theta=keys.get("rope.freq_base", DEFAULT_ROPE_THETA),
        sliding_layers=_gguf_sliding_layers(keys, fields["num_layers"]),
        sliding_rope_theta=keys.get("rope.freq_base_swa", DEFAULT_SLIDING_ROPE_THETA),
    )


def _gguf_sliding_layers(keys: gguf_config.GGUFKeys, num_layers: int) -> tuple[bool, ...]:
    """Which layers have a window. The file has a list with one entry per layer, or the period of layers without one."""
    pattern = keys.metadata.get(f"{keys.prefix}attention.sliding_window_pattern", DEFAULT_SLIDING_PATTERN)
    if hasattr(pattern, "tolist"):
        return tuple(bool(is_sliding) for is_sliding in pattern.tolist())
    step = checked_int("attention.sliding_window_pattern", pattern, MAX_VALUES["num_layers"])
    return tuple((i + 1) % step != 0 for i in range(num_layers))


GEMMA3 = ModelFamily(
    name="gemma3",
    hf_architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    gguf_architecture="gemma3",
    read_hf_config=_read_gemma3_config,
    read_gguf_config=_read_gemma3_gguf_config,
    gguf_permuted_qk=False,
    gguf_layer_names=GGUF_NAMES,
    layer=replace(LAYER, qk_norms="heads"),
)
