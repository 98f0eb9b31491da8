"""Readers for the fields of config.json that the families share, as transformers 5 and 4 write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.config import Fields
from plait.runtime.models.rope import RopeScaling, longrope_attention_factor, yarn_attention_factor
from plait.runtime.models.value_checks import MAX_VALUES, checked_bool, checked_float, checked_floats, checked_int

_ROPE_KINDS = "linear, llama3, yarn and longrope"


def common_fields(
    config: Mapping[str, Any],
    *,
    rope: Mapping[str, Any] | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    full_rotary: bool = True,
) -> Fields:
    """The fields of ModelConfig that all families name alike. Raises CorruptModel or UnsupportedModel.

    `rope`: the rotary parameters, for families that keep them elsewhere. `activation`: the key and the only value of
    the MLP's activation. `full_rotary`: all dimensions of a head must rotate.
    """
    _require_activation(config, *activation)
    if full_rotary:
        _require_full_rotary(config)
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise UnsupportedModel(
            "the model attends to later tokens too (bidirectional attention), which plait does not support"
        )
    rope = rope_parameters(config) if rope is None else rope
    hidden_size = checked_int("hidden_size", config.get("hidden_size"), MAX_VALUES["hidden_size"])
    num_heads = checked_int("num_attention_heads", config.get("num_attention_heads"), MAX_VALUES["num_heads"])
    num_kv_heads = config.get("num_key_value_heads")
    return dict(
        vocab_size=config.get("vocab_size", 0),
        hidden_size=hidden_size,
        num_layers=checked_int("num_layers", config.get("num_hidden_layers"), MAX_VALUES["num_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=config.get("intermediate_size", 0),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        context_length=config.get("max_position_embeddings", 0),
        rope_scaling=rope_scaling(rope, config),
        tie_word_embeddings=checked_bool("tie_word_embeddings", config.get("tie_word_embeddings", False)),
    )


def _require_activation(config: Mapping[str, Any], key: str, name: str) -> None:
    """Raises UnsupportedModel unless the MLP has the activation `name`."""
    if config.get(key, name) != name:
        raise UnsupportedModel(f"the activation {config[key]!r:.40} is not supported, only {name}")


def _require_full_rotary(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel if only some dimensions of a head rotate."""
    share = rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor {share!r:.20} is not supported in this family")


def attention_biases(config: Mapping[str, Any]) -> Fields:
    """Whether q, k and v have biases, and o: one field of the config."""
    bias = checked_bool("attention_bias", config.get("attention_bias", False))
    return dict(attention_bias=bias, output_bias=bias)


def all_biases(config: Mapping[str, Any]) -> Fields:
    """`attention_biases`, and whether the matrices of the MLP have biases."""
    return attention_biases(config) | {"mlp_bias": checked_bool("mlp_bias", config.get("mlp_bias", False))}


def layer_types(config: Mapping[str, Any], num_layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """For each layer, whether it has a sliding window. `default(layer)` applies if the config has no `layer_types`."""
    layer_kinds = config.get("layer_types")
    if layer_kinds is None:
        return tuple(default(i) for i in range(num_layers))
    if not isinstance(layer_kinds, list):
        raise CorruptModel("layer_types in config.json is not a list")
    for kind in layer_kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"layers of the type {kind!r:.40} are not supported")
    return tuple(kind == "sliding_attention" for kind in layer_kinds)


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary parameters: `rope_parameters` of transformers 5, or `rope_scaling` of transformers 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CorruptModel("rope_scaling in config.json is not an object")
    return rope


def rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling in the rotary parameters; None if there is none. Raises UnsupportedModel for unknown kinds."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    readers = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "su": _longrope}
    if not isinstance(kind, str) or kind not in readers:
        raise UnsupportedModel(f"the rope scaling {kind!r:.40} is not supported, only {_ROPE_KINDS}")
    return readers[kind](rope, config)


def _linear(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling("linear", factor=rope.get("factor", 0))


def _llama3(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        "llama3",
        factor=rope.get("factor", 0),
        low_freq_factor=rope.get("low_freq_factor", 0),
        high_freq_factor=rope.get("high_freq_factor", 0),
        original_context_length=_original_context_length(rope, config),
    )


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name):
            raise UnsupportedModel(f"YaRN with {name} is not supported")
    if rope.get("truncate", True) is not True:
        raise UnsupportedModel("YaRN without truncate is not supported")
    factor = checked_float("rope scaling factor", rope.get("factor"), 0.0, 1e6)
    attention_factor = rope.get("attention_factor")
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context_length=_original_context_length(rope, config),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=yarn_attention_factor(factor) if attention_factor is None else attention_factor,
    )


def _longrope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    for name in ("short_mscale", "long_mscale"):
        if rope.get(name) is not None:
            raise UnsupportedModel(f"LongRoPE with {name} is not supported")
    original = checked_int(
        "original_context_length", _original_context_length(rope, config), MAX_VALUES["context_length"]
    )
    longest = checked_int("context_length", config.get("max_position_embeddings"), MAX_VALUES["context_length"])
    factor = rope.get("factor")
    factor = longest / original if factor is None else checked_float("rope scaling factor", factor, 0.0, 1e6)
    attention_factor = rope.get("attention_factor")
    return RopeScaling(
        "longrope",
        factor=factor,
        original_context_length=original,
        divisors=checked_floats("short_factor", rope.get("short_factor")),
        long_divisors=checked_floats("long_factor", rope.get("long_factor")),
        attention_factor=longrope_attention_factor(factor, original) if attention_factor is None else attention_factor,
    )


def _original_context_length(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The context length of pretraining, from the three fields that transformers reads, in its order."""
    original_length = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return config.get("max_position_embeddings", 0) if original_length is None else original_length
