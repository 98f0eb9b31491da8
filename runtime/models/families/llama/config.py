"""Llama 1 to 3, SmolLM2 and other models of the same shape.

The other families are described by how they differ from this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.value_checks import checked_bool
from plait.runtime.models.weight_shapes import llama_layer_shapes


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    return dict(
        **hf_config.common_fields(config),
        **hf_config.attention_biases(config),
        mlp_bias=checked_bool("mlp_bias", config.get("mlp_bias", False)),
    )


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    gguf_config.require_no_experts(keys)
    return fields


FAMILY = ModelFamily(
    name="llama",
    hf_architectures=("LlamaForCausalLM", "LlamaModel"),
    gguf_architecture="llama",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=llama_layer_shapes,
    decoder="plait.runtime.models.decoder:Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=True,
)
