"""Qwen 2 and 2.5: Llama with biases on q, k and v, and a sliding window in the upper layers of some (arXiv:2407.10671).

Knows: its config's fields. Must not know: files, batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import Family
from plait.runtime.models.shapes import decoder_shapes


def read_hf(config: Mapping[str, Any]) -> ModelConfig:
    hf_config.require_activation(config, "hidden_act", "silu")
    hf_config.require_whole_rotation(config)
    fields = hf_config.common_fields(config)
    window = hf_config.optional_window(config, fields["num_layers"])
    return ModelConfig(architecture="qwen2", **fields, attention_bias=True, **window)


def read_gguf(keys: gguf_config.Keys, facts: gguf_config.TensorFacts) -> ModelConfig:
    fields = gguf_config.common_fields(keys, facts)
    gguf_config.require_whole_rotation(keys, fields["head_dim"])
    return ModelConfig(architecture="qwen2", **(fields | {"attention_bias": True}))


FAMILY = Family(
    name="qwen2",
    hf="Qwen2ForCausalLM",
    gguf="qwen2",
    read_hf=read_hf,
    read_gguf=read_gguf,
    layer_shapes=decoder_shapes,
)
