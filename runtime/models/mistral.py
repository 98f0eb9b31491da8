"""Mistral: Llama with a sliding window in every layer (arXiv:2310.06825). Its GGUF files call themselves llama.

Knows: its config's fields. Must not know: files, batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import hf_config
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import Family
from plait.runtime.models.shapes import decoder_shapes


def read_hf(config: Mapping[str, Any]) -> ModelConfig:
    hf_config.require_activation(config, "hidden_act", "silu")
    hf_config.require_whole_rotation(config)
    # What a config leaves out is what transformers takes for Mistral, not for Llama.
    fields = hf_config.common_fields({"num_key_value_heads": 8, **config})
    return ModelConfig(architecture="mistral", **fields, sliding_window=config.get("sliding_window", 4096))


FAMILY = Family(
    name="mistral",
    hf="MistralForCausalLM",
    gguf=None,
    read_hf=read_hf,
    read_gguf=None,
    layer_shapes=decoder_shapes,
)
