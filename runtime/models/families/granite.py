"""Granite 3 without experts: Llama's layer, with factors on embeddings, residuals, scores and logits.

A layer adds r times its output to the residual x. This family computes x / r instead, to which outputs are added as
they are: a norm gives the same result if its epsilon is divided by the square of r.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.models import gguf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.families.llama import read_llama_config
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.value_checks import checked_float


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    return _with_factors(
        read_llama_config(config),
        embedding=config.get("embedding_multiplier", 1.0),
        residual=config.get("residual_multiplier", 1.0),
        attention=config.get("attention_multiplier", 1.0),
        logits=config.get("logits_scaling", 1.0),
    )


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.dense_fields(keys, tensor_fields)
    return _with_factors(
        fields,
        embedding=keys.get("embedding_scale", 1.0),
        residual=keys.get("residual_scale", 1.0),
        attention=keys.get("attention.scale", 0.0) or fields["head_dim"] ** -0.5,
        logits=keys.get("logit_scale", 1.0),
    )


def _with_factors(fields: Fields, *, embedding: Any, residual: Any, attention: Any, logits: Any) -> Fields:
    """The fields with the family's factors; logits are divided by theirs."""
    residual = checked_float("residual_multiplier", residual, 0.0, 1e3)
    eps = checked_float("rms_norm_eps", fields["rms_norm_eps"], 0.0, 1.0)
    return dict(
        fields,
        rms_norm_eps=eps / residual**2,
        embedding_scale=checked_float("embedding_multiplier", embedding, 0.0, 1e6) / residual,
        attention_scale=checked_float("attention_multiplier", attention, 0.0, 1e6),
        logit_scale=1.0 / checked_float("logits_scaling", logits, 0.0, 1e6),
    )


GRANITE = ModelFamily(
    name="granite",
    hf_architectures=("GraniteForCausalLM", "GraniteModel"),
    gguf_architecture="granite",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    gguf_permuted_qk=True,
)
