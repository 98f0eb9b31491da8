"""Qwen 2 and 2.5: Llama with biases on q, k and v (arXiv:2407.10671).

Some models have a sliding window in the upper layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.weight_shapes import llama_layer_shapes


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields(config)
    window = hf_config.qwen_sliding_window(config, fields["num_layers"])
    return dict(**fields, attention_bias=True, **window)


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    return fields | {"attention_bias": True}


FAMILY = ModelFamily(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    gguf_architecture="qwen2",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=llama_layer_shapes,
    decoder="plait.runtime.models.decoder:Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=False,
)
