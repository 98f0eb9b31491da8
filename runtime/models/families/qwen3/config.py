"""Qwen 3: Llama with an RMSNorm on every query and key head (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.weight_shapes import qk_norm_layer_shapes


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields({"head_dim": 128, **config})
    window = hf_config.qwen_sliding_window(config, fields["num_layers"])
    return dict(**fields, **hf_config.attention_biases(config), **window)


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    return fields


FAMILY = ModelFamily(
    name="qwen3",
    hf_architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    gguf_architecture="qwen3",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=qk_norm_layer_shapes,
    decoder="plait.runtime.models.decoder:Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=False,
)
