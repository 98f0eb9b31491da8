"""Qwen 2 and 2.5 (arXiv:2407.10671), MiMo (arXiv:2505.07608), Qwen 3 and its experts (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.runtime.errors import CorruptModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields, MoEConfig
from plait.runtime.models.family import LayerForm, ModelFamily
from plait.runtime.models.value_checks import MAX_VALUES, checked_bool, checked_int


def _sliding_window(config: Mapping[str, Any], num_layers: int) -> Fields:
    """The window: only with `use_sliding_window`, and by default in the layers from `max_window_layers` on."""
    if not checked_bool("use_sliding_window", config.get("use_sliding_window", False)):
        return {}
    first = config.get("max_window_layers", 28)
    if type(first) is not int:
        raise CorruptModel(f"max_window_layers is {first!r:.40}, not a whole number")
    sliding = hf_config.layer_types(config, num_layers, lambda i: i >= first)
    window = config.get("sliding_window", 4096)
    return dict(sliding_window=window if any(sliding) else None, sliding_layers=sliding)


def _read_qwen2_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields(config)
    return dict(**fields, attention_bias=True, **_sliding_window(config, fields["num_layers"]))


def _read_qwen2_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    return gguf_config.common_fields(keys, tensor_fields) | {"attention_bias": True}


# Llama with biases on q, k and v. Some models have a sliding window in the upper layers.
QWEN2 = ModelFamily(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    gguf_architecture="qwen2",
    read_hf_config=_read_qwen2_config,
    read_gguf_config=_read_qwen2_gguf_config,
    gguf_permuted_qk=False,
)


def _read_mimo_config(config: Mapping[str, Any]) -> Fields:
    count = config.get("num_nextn_predict_layers") or 0
    if count:
        checked_int("num_nextn_predict_layers", count, MAX_VALUES["num_layers"])
    return _read_qwen2_config(config) | {"num_mtp_layers": count}


# Qwen 2 with multi-token-prediction layers. llama.cpp has no name for it.
MIMO = replace(
    QWEN2,
    name="mimo",
    hf_architectures=("MiMoForCausalLM", "MiMoModel"),
    gguf_architecture=None,
    read_hf_config=_read_mimo_config,
    read_gguf_config=None,
)


def _read_qwen3_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields({"head_dim": 128, **config})
    return dict(**fields, **hf_config.attention_biases(config), **_sliding_window(config, fields["num_layers"]))


# Llama with an RMSNorm on every query and key head.
QWEN3 = ModelFamily(
    name="qwen3",
    hf_architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    gguf_architecture="qwen3",
    read_hf_config=_read_qwen3_config,
    read_gguf_config=gguf_config.common_fields,
    gguf_permuted_qk=False,
    layer=LayerForm(qk_norms="heads"),
)


def _read_qwen3_moe_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields(config)
    windowed = checked_bool("use_sliding_window", config.get("use_sliding_window", False))
    return dict(
        **fields,
        **hf_config.attention_biases(config),
        sliding_window=config.get("sliding_window", 4096) if windowed else None,
        experts=MoEConfig(
            num_experts=config.get("num_experts", config.get("num_local_experts", 128)),
            experts_per_token=config.get("num_experts_per_tok", 8),
            intermediate_size=config.get("moe_intermediate_size", 768),
            normalize_topk=config.get("norm_topk_prob", False),
            layers=_layers_with_experts(config, fields["num_layers"]),
        ),
    )


def _layers_with_experts(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer except those in `mlp_only_layers`."""
    step = checked_int("decoder_sparse_step", config.get("decoder_sparse_step", 1), MAX_VALUES["num_layers"])
    mlp_only = config.get("mlp_only_layers") or []
    if not isinstance(mlp_only, list) or any(type(i) is not int for i in mlp_only):
        raise CorruptModel("mlp_only_layers in config.json is not a list of whole numbers")
    return tuple(i not in mlp_only and (i + 1) % step == 0 for i in range(num_layers))


def _read_qwen3_moe_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    width = keys.checked_int("expert_feed_forward_length", MAX_VALUES["intermediate_size"])
    normalize = checked_bool("expert_weights_norm", keys.get("expert_weights_norm", True))  # llama.cpp's default
    return dict(**fields, experts=gguf_config.experts(keys, fields["num_layers"], width, normalize))


# Qwen 3 with a mixture of experts in place of the MLP, in all layers or in some.
QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    hf_architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    gguf_architecture="qwen3moe",
    read_hf_config=_read_qwen3_moe_config,
    read_gguf_config=_read_qwen3_moe_gguf_config,
    gguf_permuted_qk=False,
    gguf_layer_names=gguf_config.EXPERT_NAMES,
    layer=LayerForm(qk_norms="heads"),
)
