"""The Llama family: Llama 1 to 3, SmolLM2, and what else has their shape. Every other family is told by how it differs.

Knows: its config's fields. Must not know: files, batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checks import flag
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import Family
from plait.runtime.models.shapes import decoder_shapes


def read_hf(config: Mapping[str, Any]) -> ModelConfig:
    hf_config.require_activation(config, "hidden_act", "silu")
    hf_config.require_whole_rotation(config)
    bias = flag("attention_bias", config.get("attention_bias", False))
    return ModelConfig(
        architecture="llama",
        **hf_config.common_fields(config),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=flag("mlp_bias", config.get("mlp_bias", False)),
    )


def read_gguf(keys: gguf_config.Keys, facts: gguf_config.TensorFacts) -> ModelConfig:
    fields = gguf_config.common_fields(keys, facts)
    gguf_config.require_no_experts(keys)
    gguf_config.require_whole_rotation(keys, fields["head_dim"])
    return ModelConfig(architecture="llama", **fields)


FAMILY = Family(
    name="llama",
    hf="LlamaForCausalLM",
    gguf="llama",
    read_hf=read_hf,
    read_gguf=read_gguf,
    layer_shapes=decoder_shapes,
    gguf_interleaved=True,
)
