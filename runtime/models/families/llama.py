"""Llama 1 to 3, SmolLM2 and other models of the same shape; Mistral and Mixtral, which extend it.

The other families are described by how they differ from Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields, MoEConfig
from plait.runtime.models.family import ModelFamily


def read_llama_config(config: Mapping[str, Any]) -> Fields:
    return dict(**hf_config.common_fields(config), **hf_config.all_biases(config))


LLAMA = ModelFamily(
    name="llama",
    hf_architectures=("LlamaForCausalLM", "LlamaModel"),
    gguf_architecture="llama",
    read_hf_config=read_llama_config,
    read_gguf_config=gguf_config.dense_fields,
    gguf_permuted_qk=True,
)


def _read_mistral_config(config: Mapping[str, Any]) -> Fields:
    # transformers' default for Mistral, which differs from Llama's.
    fields = hf_config.common_fields({"num_key_value_heads": 8, **config})
    return dict(**fields, sliding_window=config.get("sliding_window", 4096))


# Llama with a sliding window in every layer (arXiv:2310.06825). In GGUF files it is a `llama`.
MISTRAL = ModelFamily(
    name="mistral",
    hf_architectures=("MistralForCausalLM", "MistralModel"),
    gguf_architecture=None,
    read_hf_config=_read_mistral_config,
    read_gguf_config=None,
    gguf_permuted_qk=False,
)


def _read_mixtral_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields(config)
    return dict(
        **fields,
        sliding_window=config.get("sliding_window"),
        experts=MoEConfig(
            num_experts=config.get("num_local_experts", 8),
            experts_per_token=config.get("num_experts_per_tok", 2),
            intermediate_size=fields["intermediate_size"],
            normalize_topk=True,
            layers=(True,) * fields["num_layers"],
        ),
    )


def _read_mixtral_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    experts = gguf_config.experts(keys, fields["num_layers"], fields["intermediate_size"], normalize_topk=True)
    return dict(**fields, experts=experts)


# Mistral's layer with a mixture of experts in place of the MLP (arXiv:2401.04088).
MIXTRAL = ModelFamily(
    name="mixtral",
    hf_architectures=("MixtralForCausalLM", "MixtralModel"),
    gguf_architecture="llama",
    read_hf_config=_read_mixtral_config,
    read_gguf_config=_read_mixtral_gguf_config,
    gguf_permuted_qk=True,
    gguf_has_experts=True,
    gguf_layer_names=gguf_config.EXPERT_NAMES,
    hf_layer_names={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.w1",
        "mlp.experts.up_proj": "block_sparse_moe.experts.w3",
        "mlp.experts.down_proj": "block_sparse_moe.experts.w2",
    },
)
