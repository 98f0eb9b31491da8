"""Gemma 2 (arXiv:2408.00118): soft caps on attention scores and logits, a window in every other layer.

Norms and activation are those of Gemma 3, whose decoder computes the family; queries and keys are not normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import UnsupportedModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import Fields, ModelConfig
from plait.runtime.models.families.gemma3.config import ACTIVATION, LAYER_NORM_NAMES
from plait.runtime.models.family import ModelFamily, PackedLayer
from plait.runtime.models.value_checks import MAX_VALUES, checked_float, checked_int
from plait.runtime.models.weight_shapes import attention_shapes, mlp_shapes, norm_shapes

DEFAULT_WINDOW, DEFAULT_ATTENTION_CAP, DEFAULT_LOGIT_CAP = 4096, 50.0, 30.0  # in both containers
LAYERS_OF_27B = 46


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("Gemma 2 with use_bidirectional_attention is not supported")
    fields = hf_config.common_fields({"head_dim": 256, "tie_word_embeddings": True, **config}, activation=ACTIVATION)
    scalar = checked_float("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), 0.0, 1e9)
    window = config.get("sliding_window", DEFAULT_WINDOW)
    return dict(
        **fields,
        **hf_config.attention_biases(config),
        sliding_window=checked_int("sliding_window", window, MAX_VALUES["context_length"]),
        sliding_layers=hf_config.layer_types(config, fields["num_layers"], _is_sliding),
        attention_scale=scalar**-0.5,
        embedding_scale=fields["hidden_size"] ** 0.5,
        attention_softcap=config.get("attn_logit_softcapping", DEFAULT_ATTENTION_CAP) or 0.0,
        logit_softcap=config.get("final_logit_softcapping", DEFAULT_LOGIT_CAP) or 0.0,
    )


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields, has_softcaps=True)
    num_layers = fields["num_layers"]
    # The file does not state the attention scale. It is 1 / sqrt(head_dim) except in the 27B.
    width = fields["hidden_size"] / fields["num_heads"] if num_layers == LAYERS_OF_27B else fields["head_dim"]
    return dict(
        fields,
        sliding_window=fields["sliding_window"] or DEFAULT_WINDOW,
        sliding_layers=tuple(_is_sliding(i) for i in range(num_layers)),
        attention_scale=keys.get("attention.scale", width**-0.5),
        embedding_scale=fields["hidden_size"] ** 0.5,
        attention_softcap=keys.get("attn_logit_softcapping", DEFAULT_ATTENTION_CAP),
        logit_softcap=keys.get("final_logit_softcapping", DEFAULT_LOGIT_CAP),
    )


def _is_sliding(layer: int) -> bool:
    """Whether the layer has a window, unless the config lists the types of layers."""
    return layer % 2 == 0


def layer_shapes(config: ModelConfig, layer: int) -> WeightShapes:
    return norm_shapes(config, *LAYER_NORM_NAMES) | attention_shapes(config) | mlp_shapes(config)


FAMILY = ModelFamily(
    name="gemma2",
    hf_architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    gguf_architecture="gemma2",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    layer_shapes=layer_shapes,
    decoder="plait.runtime.models.families.gemma3.layers:Gemma3Decoder",
    has_packed_cpu=True,
    gguf_permuted_qk=False,
    gguf_layer_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    layer_norms=LAYER_NORM_NAMES,
    packed_layer=PackedLayer("gelu", unit_norms=True),
)
