"""Mixtral: Mistral's layer with a mixture of experts in place of the MLP (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import Fields, ModelConfig, MoEConfig
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.weight_shapes import attention_shapes, experts_or_mlp_shapes, norm_shapes


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields(config)
    return dict(
        **fields,
        sliding_window=config.get("sliding_window"),
        experts=MoEConfig(
            num_experts=config.get("num_local_experts", 8),
            experts_per_token=config.get("num_experts_per_tok", 2),
            intermediate_size=fields["intermediate_size"],
            normalize_topk=True,
            layers=(True,) * fields["num_layers"],
        ),
    )


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    experts = gguf_config.experts(keys, fields["num_layers"], fields["intermediate_size"], normalize_topk=True)
    return dict(**fields, experts=experts)


def layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    norms = norm_shapes(config, "input_layernorm", "post_attention_layernorm")
    return norms | attention_shapes(config) | experts_or_mlp_shapes(config, layer)


FAMILY = ModelFamily(
    name="mixtral",
    hf_architectures=("MixtralForCausalLM", "MixtralModel"),
    gguf_architecture="llama",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=layer_shapes,
    decoder="plait.runtime.models.decoder:Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=True,
    gguf_has_experts=True,
    gguf_layer_names=gguf_config.EXPERT_NAMES,
    hf_layer_names={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.w1",
        "mlp.experts.up_proj": "block_sparse_moe.experts.w3",
        "mlp.experts.down_proj": "block_sparse_moe.experts.w2",
    },
)
