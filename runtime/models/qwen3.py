"""Qwen 3: Llama with a norm on every query and key head (arXiv:2505.09388).

Knows: its config's fields. Must not know: files, batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checks import flag
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import Family
from plait.runtime.models.shapes import normed_decoder_shapes


def read_hf(config: Mapping[str, Any]) -> ModelConfig:
    hf_config.require_activation(config, "hidden_act", "silu")
    hf_config.require_whole_rotation(config)
    fields = hf_config.common_fields({"head_dim": 128, **config})
    bias = flag("attention_bias", config.get("attention_bias", False))
    window = hf_config.optional_window(config, fields["num_layers"])
    return ModelConfig(architecture="qwen3", **fields, attention_bias=bias, output_bias=bias, **window)


def read_gguf(keys: gguf_config.Keys, facts: gguf_config.TensorFacts) -> ModelConfig:
    fields = gguf_config.common_fields(keys, facts)
    gguf_config.require_whole_rotation(keys, fields["head_dim"])
    return ModelConfig(architecture="qwen3", **fields)


FAMILY = Family(
    name="qwen3",
    hf="Qwen3ForCausalLM",
    gguf="qwen3",
    read_hf=read_hf,
    read_gguf=read_gguf,
    layer_shapes=normed_decoder_shapes,
)
