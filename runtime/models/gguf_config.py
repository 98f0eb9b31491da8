"""What every family's GGUF metadata has in common, read and checked.

Knows: the keys `<architecture>.*` and what only a file's tensors tell. Must not know: one family's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel
from plait.runtime.models.checks import MOST, real, whole
from plait.runtime.models.hf_config import Fields
from plait.runtime.models.rope import RopeScaling, longrope_magnitude, yarn_magnitude


@dataclass(frozen=True)
class TensorFacts:
    """What the metadata does not say and the list of tensors does.

    `rope_divisors`: the values of the tensor `rope_freqs.weight`; `rope_short` and `rope_long`: those of
    `rope_factors_short.weight` and `rope_factors_long.weight`; None where there is none.
    """

    tie_word_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rope_divisors: tuple[float, ...] | None = None
    rope_short: tuple[float, ...] | None = None
    rope_long: tuple[float, ...] | None = None


class Keys:
    """One architecture's keys in the metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.prefix = f"{metadata.get('general.architecture')}."

    def get(self, key: str, default: Any) -> Any:
        """One value for the whole model. UnsupportedModel if the file has a list there."""
        value = self.metadata.get(self.prefix + key, default)
        if not isinstance(value, str | int | float | None):
            raise UnsupportedModel(f"{self.prefix}{key} is a list; plait reads one value for all layers")
        return value

    def whole(self, key: str, most: int) -> int:
        """A whole number that must be there."""
        return whole(self.prefix + key, self.get(key, None), most)

    def per_layer(self, key: str, most: int, default: int | None = None) -> int:
        """A number that a file may also give as an array with one entry per layer."""
        value = self.metadata.get(self.prefix + key, default)
        if hasattr(value, "tolist"):
            different = set(value.tolist())
            if len(different) > 1:
                raise UnsupportedModel(f"{self.prefix}{key} differs between layers; plait needs equal layers")
            value = different.pop() if different else None
        return whole(self.prefix + key, value, most)


def common_fields(keys: Keys, facts: TensorFacts) -> Fields:
    """The fields of ModelConfig that all families keep under the same keys. Raises CorruptModel, UnsupportedModel."""
    _refuse_variants(keys)
    hidden_size = keys.whole("embedding_length", MOST["hidden_size"])
    num_heads = keys.per_layer("attention.head_count", MOST["num_heads"])
    words = keys.metadata.get("tokenizer.ggml.tokens")
    return dict(
        vocab_size=keys.get("vocab_size", len(words) if isinstance(words, list) else 0),
        hidden_size=hidden_size,
        num_layers=keys.whole("block_count", MOST["num_layers"]),
        num_heads=num_heads,
        num_kv_heads=keys.per_layer("attention.head_count_kv", MOST["num_heads"], num_heads),
        head_dim=_head_dim(keys, hidden_size // num_heads),
        intermediate_size=keys.per_layer("feed_forward_length", MOST["intermediate_size"]),
        rms_norm_eps=keys.get("attention.layer_norm_rms_epsilon", None),
        rope_theta=keys.get("rope.freq_base", 10_000.0),
        context_length=keys.whole("context_length", MOST["context_length"]),
        rope_scaling=_rope_scaling(keys, facts),
        tie_word_embeddings=facts.tie_word_embeddings,
        attention_bias=facts.attention_bias,
        output_bias=facts.output_bias,
        mlp_bias=facts.mlp_bias,
        sliding_window=keys.get("attention.sliding_window", 0) or None,
    )


def require_whole_rotation(keys: Keys, head_dim: int) -> None:
    """UnsupportedModel where only a part of each head rotates."""
    if keys.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"rope.dimension_count differs from the head size {head_dim}; they must be equal")


def require_no_experts(keys: Keys) -> None:
    """UnsupportedModel for a mixture of experts."""
    if keys.get("expert_count", 0):
        raise UnsupportedModel(f"plait does not run {keys.prefix[:-1]} as a mixture of experts; it runs qwen3moe")


def _head_dim(keys: Keys, default: int) -> int:
    head_dim = whole("attention.key_length", keys.get("attention.key_length", default), MOST["head_dim"])
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"attention.value_length differs from the head size {head_dim}; they must be equal")
    return head_dim


def _refuse_variants(keys: Keys) -> None:
    if keys.get("attention.clamp_kqv", 0) or keys.get("use_parallel_residual", False):
        raise UnsupportedModel("the model clamps attention or runs its blocks in parallel, unlike plait")
    if keys.get("attention.causal", True) is False:
        raise UnsupportedModel("the model attends to later tokens too (bidirectional attention), which plait cannot")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.get(key, 0):
            raise UnsupportedModel(f"{keys.prefix}{key} is not supported")
    split = keys.metadata.get("split.count", 0)
    if type(split) is int and split > 1:
        raise UnsupportedModel(f"the model is split into {split} GGUF files; merge them first")


def _rope_scaling(keys: Keys, facts: TensorFacts) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if facts.rope_short is not None or facts.rope_long is not None:
        return _longrope(keys, facts)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"the rope scaling {kind!r:.40} is not supported; there are linear, yarn and llama3")
    scaled = kind != "none" or factor != 1.0
    if facts.rope_divisors is not None:
        if scaled:
            raise UnsupportedModel(f"the model has both {kind} rope scaling and rope divisors; plait takes one")
        return RopeScaling("divisors", divisors=facts.rope_divisors)
    if kind == "yarn":
        return _yarn(keys, real("rope.scaling.factor", factor, 0.0, 1e6))
    return RopeScaling("linear", factor=factor) if scaled else None


def _yarn(keys: Keys, factor: float) -> RopeScaling:
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"):
        if keys.get(key, None) is not None:
            raise UnsupportedModel(f"YaRN with {keys.prefix}{key} is not supported")
    own = real("YaRN's attention factor", keys.get("rope.scaling.attn_factor", 1.0), 0.0, 1e6)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_context_length=keys.get("rope.scaling.original_context_length", keys.get("context_length", 0)),
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=own * yarn_magnitude(factor),
    )


def _longrope(keys: Keys, facts: TensorFacts) -> RopeScaling:
    if facts.rope_short is None or facts.rope_long is None:
        raise CorruptModel("the file has one of the tensors rope_factors_short and rope_factors_long, not both")
    longest = keys.whole("context_length", MOST["context_length"])
    original = keys.get("rope.scaling.original_context_length", longest)
    factor = longest / whole("original_context_length", original, MOST["context_length"])
    magnitude = keys.get("rope.scaling.attn_factor", None)
    return RopeScaling(
        "longrope",
        factor=factor,
        original_context_length=original,
        divisors=facts.rope_short,
        long_divisors=facts.rope_long,
        magnitude=longrope_magnitude(factor, original) if magnitude is None else magnitude,
    )
