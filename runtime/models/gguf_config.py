"""Readers for the GGUF metadata that the families share: the keys `<architecture>.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.config import Fields, MoEConfig
from plait.runtime.models.rope import RopeScaling, longrope_attention_factor, yarn_attention_factor
from plait.runtime.models.value_checks import MAX_VALUES, checked_float, checked_int


@dataclass(frozen=True)
class TensorDerivedFields:
    """Facts that follow from a file's list of tensors and are not in its metadata.

    `rope_divisors`, `rope_short` and `rope_long` are the values of the tensors `rope_freqs.weight`,
    `rope_factors_short.weight` and `rope_factors_long.weight`; None if the file lacks the tensor.
    """

    tie_word_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rope_divisors: tuple[float, ...] | None = None
    rope_short: tuple[float, ...] | None = None
    rope_long: tuple[float, ...] | None = None


class GGUFKeys:
    """The metadata keys of the file's architecture, without their prefix."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.prefix = f"{metadata.get('general.architecture')}."

    def get(self, key: str, default: Any) -> Any:
        """The value that holds for all layers. Raises UnsupportedModel if the file has a list."""
        value = self.metadata.get(self.prefix + key, default)
        if not isinstance(value, str | int | float | None):
            raise UnsupportedModel(f"{self.prefix}{key} is a list; plait supports only one value for all layers")
        return value

    def checked_int(self, key: str, maximum: int) -> int:
        """A required int from 1 to `maximum`."""
        return checked_int(self.prefix + key, self.get(key, None), maximum)

    def uniform_int(self, key: str, maximum: int, default: int | None = None) -> int:
        """An int from 1 to `maximum`, stored as one value or as an array of equal values, one per layer."""
        value = self.metadata.get(self.prefix + key, default)
        if hasattr(value, "tolist"):
            values = set(value.tolist())
            if len(values) > 1:
                raise UnsupportedModel(f"{self.prefix}{key} differs between layers; plait supports only equal layers")
            value = values.pop() if values else None
        return checked_int(self.prefix + key, value, maximum)


def common_fields(
    keys: GGUFKeys, tensor_fields: TensorDerivedFields, *, has_softcaps: bool = False, full_rotary: bool = True
) -> Fields:
    """The fields of ModelConfig that all families store alike. Raises CorruptModel or UnsupportedModel.

    `has_softcaps`: whether the caller reads the keys of soft-capping.
    """
    _reject_unsupported_fields(keys)
    if not has_softcaps:
        _reject_softcaps(keys)
    hidden_size = keys.checked_int("embedding_length", MAX_VALUES["hidden_size"])
    num_heads = keys.uniform_int("attention.head_count", MAX_VALUES["num_heads"])
    head_dim = _head_dim(keys, hidden_size // num_heads)
    if full_rotary:
        _require_full_rotary(keys, head_dim)
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return dict(
        vocab_size=keys.get("vocab_size", len(tokens) if isinstance(tokens, list) else 0),
        hidden_size=hidden_size,
        num_layers=keys.checked_int("block_count", MAX_VALUES["num_layers"]),
        num_heads=num_heads,
        num_kv_heads=keys.uniform_int("attention.head_count_kv", MAX_VALUES["num_heads"], num_heads),
        head_dim=head_dim,
        intermediate_size=keys.uniform_int("feed_forward_length", MAX_VALUES["intermediate_size"]),
        rms_norm_eps=keys.get("attention.layer_norm_rms_epsilon", None),
        rope_theta=keys.get("rope.freq_base", 10_000.0),
        context_length=keys.checked_int("context_length", MAX_VALUES["context_length"]),
        rope_scaling=_rope_scaling(keys, tensor_fields),
        tie_word_embeddings=tensor_fields.tie_word_embeddings,
        attention_bias=tensor_fields.attention_bias,
        output_bias=tensor_fields.output_bias,
        mlp_bias=tensor_fields.mlp_bias,
        sliding_window=keys.get("attention.sliding_window", 0) or None,
    )


def _require_full_rotary(keys: GGUFKeys, head_dim: int) -> None:
    """Raises UnsupportedModel if only some dimensions of a head rotate."""
    if keys.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"rope.dimension_count differs from the head size {head_dim}; they must be equal")


def dense_fields(keys: GGUFKeys, tensor_fields: TensorDerivedFields) -> Fields:
    """`common_fields` of a model without experts. Raises UnsupportedModel for a mixture of experts."""
    fields = common_fields(keys, tensor_fields)
    if keys.get("expert_count", 0):
        raise UnsupportedModel(
            f"plait does not run {keys.prefix[:-1]} as a mixture of experts; it runs llama (Mixtral) and qwen3moe"
        )
    return fields


EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
"""GGUF names of a layer's router and experts."""


def experts(keys: GGUFKeys, num_layers: int, width: int, normalize_topk: bool) -> MoEConfig:
    """Experts of `width` in all layers."""
    return MoEConfig(
        num_experts=keys.checked_int("expert_count", MAX_VALUES["num_experts"]),
        experts_per_token=keys.checked_int("expert_used_count", MAX_VALUES["num_experts"]),
        intermediate_size=width,
        normalize_topk=normalize_topk,
        layers=(True,) * num_layers,
    )


def _head_dim(keys: GGUFKeys, default: int) -> int:
    head_dim = checked_int("attention.key_length", keys.get("attention.key_length", default), MAX_VALUES["head_dim"])
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"attention.value_length differs from the head size {head_dim}; they must be equal")
    return head_dim


def _reject_unsupported_fields(keys: GGUFKeys) -> None:
    if keys.get("attention.clamp_kqv", 0) or keys.get("use_parallel_residual", False):
        raise UnsupportedModel(
            "the model clamps attention or has parallel residual blocks, which plait does not support"
        )
    if keys.get("attention.causal", True) is False:
        raise UnsupportedModel(
            "the model attends to later tokens too (bidirectional attention), which plait does not support"
        )
    split = keys.metadata.get("split.count", 0)
    if type(split) is int and split > 1:
        raise UnsupportedModel(f"the model is split into {split} GGUF files; merge them first")


def _reject_softcaps(keys: GGUFKeys) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.get(key, 0):
            raise UnsupportedModel(f"{keys.prefix}{key} is not supported")


def _rope_scaling(keys: GGUFKeys, tensor_fields: TensorDerivedFields) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if tensor_fields.rope_short is not None or tensor_fields.rope_long is not None:
        return _longrope(keys, tensor_fields)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"the rope scaling {kind!r:.40} is not supported, only linear, yarn and llama3")
    scaled = kind != "none" or factor != 1.0
    if tensor_fields.rope_divisors is not None:
        if scaled:
            raise UnsupportedModel(
                f"the model has both {kind} rope scaling and rope divisors; plait supports only one of them"
            )
        return RopeScaling("divisors", divisors=tensor_fields.rope_divisors)
    if kind == "yarn":
        return _yarn(keys, checked_float("rope.scaling.factor", factor, 0.0, 1e6))
    return RopeScaling("linear", factor=factor) if scaled else None


def _yarn(keys: GGUFKeys, factor: float) -> RopeScaling:
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"):
        if keys.get(key, None) is not None:
            raise UnsupportedModel(f"YaRN with {keys.prefix}{key} is not supported")
    attn_factor = checked_float("YaRN's attention factor", keys.get("rope.scaling.attn_factor", 1.0), 0.0, 1e6)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context_length=keys.get("rope.scaling.original_context_length", keys.get("context_length", 0)),
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attn_factor * yarn_attention_factor(factor),
    )


def _longrope(keys: GGUFKeys, tensor_fields: TensorDerivedFields) -> RopeScaling:
    if tensor_fields.rope_short is None or tensor_fields.rope_long is None:
        raise CorruptModel("the file has one of the tensors rope_factors_short and rope_factors_long, not both")
    longest = keys.checked_int("context_length", MAX_VALUES["context_length"])
    original = keys.get("rope.scaling.original_context_length", longest)
    factor = longest / checked_int("original_context_length", original, MAX_VALUES["context_length"])
    attention_factor = keys.get("rope.scaling.attn_factor", None)
    return RopeScaling(
        "longrope",
        factor=factor,
        original_context_length=original,
        divisors=tensor_fields.rope_short,
        long_divisors=tensor_fields.rope_long,
        attention_factor=longrope_attention_factor(factor, original) if attention_factor is None else attention_factor,
    )
