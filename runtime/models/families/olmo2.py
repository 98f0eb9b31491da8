"""OLMo 2: norms on the outputs of attention and MLP instead of their inputs (arXiv:2501.00656).

Queries and keys are normed too, each over all heads of a token together. OLMo 3, whose layers have windows, has the
same name in GGUF files, where `attention.sliding_window` tells it from OLMo 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import UnsupportedModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import LayerForm, ModelFamily


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    return dict(**hf_config.common_fields({"rms_norm_eps": 1e-5, **config}), **hf_config.attention_biases(config))


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    if fields["sliding_window"] is not None:
        raise UnsupportedModel("the file has OLMo 3 (olmo2.attention.sliding_window), of which plait runs OLMo 2 only")
    return fields


OLMO2 = ModelFamily(
    name="olmo2",
    hf_architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    gguf_architecture="olmo2",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    gguf_permuted_qk=False,
    gguf_layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    layer=LayerForm(
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norms="joint",
        float32_norms=True,
    ),
)
