"""Qwen 3 with a mixture of experts in place of the MLP, in all layers or in some (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import CorruptModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import Fields, ModelConfig, MoEConfig
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.value_checks import MAX_VALUES, checked_bool, checked_int
from plait.runtime.models.weight_shapes import attention_shapes, experts_or_mlp_shapes, norm_shapes, qk_norm_shapes


def read_hf_config(config: Mapping[str, Any]) -> Fields:
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


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    width = keys.checked_int("expert_feed_forward_length", MAX_VALUES["intermediate_size"])
    normalize = checked_bool("expert_weights_norm", keys.get("expert_weights_norm", True))  # llama.cpp's default
    return dict(**fields, experts=gguf_config.experts(keys, fields["num_layers"], width, normalize))


def layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    norms = norm_shapes(config, "input_layernorm", "post_attention_layernorm")
    return norms | attention_shapes(config) | qk_norm_shapes(config) | experts_or_mlp_shapes(config, layer)


FAMILY = ModelFamily(
    name="qwen3_moe",
    hf_architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    gguf_architecture="qwen3moe",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=layer_shapes,
    decoder="plait.runtime.models.decoder:Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=False,
    gguf_layer_names=gguf_config.EXPERT_NAMES,
)
