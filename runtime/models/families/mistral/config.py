"""Mistral: Llama with a sliding window in every layer (arXiv:2310.06825). In GGUF files it is a `llama`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.weight_shapes import llama_layer_shapes


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    # transformers' default for Mistral, which differs from Llama's.
    fields = hf_config.common_fields({"num_key_value_heads": 8, **config})
    return dict(**fields, sliding_window=config.get("sliding_window", 4096))


FAMILY = ModelFamily(
    name="mistral",
    hf_architectures=("MistralForCausalLM", "MistralModel"),
    gguf_architecture=None,
    read_hf_config=read_hf_config,
    read_gguf_config=None,
    layer_shapes=llama_layer_shapes,
    decoder="plait.runtime.models.decoder:Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=False,
)
