"""Qwen 2 and 2.5: Llama with biases on q, k and v, and a sliding window in the upper layers of some (arXiv:2407.10671).

Knows: its config's fields. Must not know: files, batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.loading import gguf_config, hf_config
from plait.runtime.models.weight_shapes import llama_layer_shapes


def read_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    hf_config.require_activation(config, "hidden_act", "silu")
    hf_config.require_full_rotary(config)
    fields = hf_config.common_fields(config)
    window = hf_config.qwen_sliding_window(config, fields["num_layers"])
    return ModelConfig(architecture="qwen2", **fields, attention_bias=True, **window)


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> ModelConfig:
    fields = gguf_config.common_fields(keys, tensor_fields)
    gguf_config.require_full_rotary(keys, fields["head_dim"])
    return ModelConfig(architecture="qwen2", **(fields | {"attention_bias": True}))


FAMILY = ModelFamily(
    name="qwen2",
    hf="Qwen2ForCausalLM",
    gguf_architecture="qwen2",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=llama_layer_shapes,
)
