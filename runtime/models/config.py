"""The shape of a decoder-only model, from a GGUF's metadata or a Hugging Face config.json, all checked.

Knows: the names both sides use, and which architectures plait runs. Must not know: torch, tensors, files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plait.runtime.errors import CorruptModel, UnsupportedModel

# Hugging Face architecture -> ours. GGUF calls both of them "llama".
HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}
GGUF_ARCHITECTURES = {"llama": "llama"}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the context of pretraining.

    `linear`: all divided by `factor`. `llama3`: long wavelengths divided by `factor`, short ones kept, a
    smooth step between. `divisors`: frequency i divided by `divisors[i]`, one per rotary pair, as GGUF
    stores llama3.
    """

    kind: Literal["linear", "llama3", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Everything a forward pass must know about a model besides its weights.

    `attention_bias`: q, k, v and o have a bias each; `mlp_bias`: gate, up and down have. `sliding_window`:
    the number of latest positions a query sees, None for all. Raises CorruptModel where numbers contradict.

    >>> from_hf(json.load(open("config.json"))).num_layers  # doctest: +SKIP
    30
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            _whole(name, getattr(self, name), most)
        if self.sliding_window is not None:
            _whole("sliding_window", self.sliding_window, _MOST["context_length"])
        _real("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)
        _real("rope_theta", self.rope_theta, 0.0, 1e15)
        if self.num_heads % self.num_kv_heads:
            raise CorruptModel(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise CorruptModel(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling, self.head_dim)

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each rotary pair, [head_dim / 2], scaling included.

        Llama 3's step is the one of https://arxiv.org/abs/2407.21783, linear that of arXiv:2306.15595.
        """
        plain = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return tuple(plain)
        if scaling.kind == "linear":
            return tuple(frequency / scaling.factor for frequency in plain)
        if scaling.kind == "divisors":
            return tuple(frequency / by for frequency, by in zip(plain, scaling.divisors, strict=True))
        return tuple(_llama3(frequency, scaling) for frequency in plain)


# The largest value that any model could mean; what is larger is a damaged file.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**12,
    "intermediate_size": 2**24,
    "context_length": 2**30,
}


def _whole(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must be a whole number from 1 to {most}")
    return value


def _real(name: str, value: Any, above: float, below: float) -> float:
    if type(value) not in (int, float) or not above < value < below:  # NaN fails the comparison
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must lie in {above:g} to {below:g}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise CorruptModel(f"the model's {name} is {value!r:.60}; it must be true or false")
    return value


def _check_rope_scaling(scaling: RopeScaling, head_dim: int) -> None:
    _real("rope scaling factor", scaling.factor, 0.0, 1e6)
    if scaling.kind == "llama3":
        low = _real("low_freq_factor", scaling.low_freq_factor, 0.0, 1e6)
        high = _real("high_freq_factor", scaling.high_freq_factor, 0.0, 1e6)
        _whole("original_context_length", scaling.original_context_length, _MOST["context_length"])
        if not low < high:
            raise CorruptModel(f"rope scaling: low_freq_factor {low:g} is not below {high:g}, the high one")
    if scaling.kind == "divisors":
        if len(scaling.divisors) != head_dim // 2:
            raise CorruptModel(f"{len(scaling.divisors)} rope divisors for a head_dim of {head_dim}")
        for divisor in scaling.divisors:
            _real("rope divisor", divisor, 0.0, 1e6)


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_context_length * frequency / (2 * math.pi)  # over the original context
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    step = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - step) * frequency / scaling.factor + step * frequency


def from_gguf(
    metadata: Mapping[str, Any],
    *,
    tie_word_embeddings: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_divisors: Sequence[float] | None = None,
) -> ModelConfig:
    """The config in a GGUF's metadata. What only the file's tensors tell comes in by keyword.

    `rope_divisors`: the values of the tensor `rope_freqs.weight` where there is one.
    Raises CorruptModel or UnsupportedModel.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        raise _unsupported(architecture, GGUF_ARCHITECTURES)
    keys = _Keys(metadata, f"{architecture}.")
    _refuse_gguf_variants(metadata, keys)
    hidden_size = keys.whole("embedding_length", _MOST["hidden_size"])
    num_heads = keys.per_layer("attention.head_count", _MOST["num_heads"])
    words = metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[architecture],
        vocab_size=keys.get("vocab_size", len(words) if isinstance(words, list) else 0),
        hidden_size=hidden_size,
        num_layers=keys.whole("block_count", _MOST["num_layers"]),
        num_heads=num_heads,
        num_kv_heads=keys.per_layer("attention.head_count_kv", _MOST["num_heads"], num_heads),
        head_dim=_gguf_head_dim(keys, hidden_size // num_heads),
        intermediate_size=keys.per_layer("feed_forward_length", _MOST["intermediate_size"]),
        rms_norm_eps=keys.get("attention.layer_norm_rms_epsilon", None),
        rope_theta=keys.get("rope.freq_base", 10_000.0),
        context_length=keys.whole("context_length", _MOST["context_length"]),
        rope_scaling=_gguf_rope_scaling(keys, rope_divisors),
        tie_word_embeddings=tie_word_embeddings,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        sliding_window=keys.get("attention.sliding_window", 0) or None,
    )


def _gguf_head_dim(keys: _Keys, default: int) -> int:
    head_dim = _whole("attention.key_length", keys.get("attention.key_length", default), _MOST["head_dim"])
    for same in ("attention.value_length", "rope.dimension_count"):
        if keys.get(same, head_dim) != head_dim:
            raise UnsupportedModel(f"{same} differs from the head size {head_dim}; they must be equal")
    return head_dim


class _Keys:
    """One architecture's keys in the metadata."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self.metadata, self.prefix = metadata, prefix

    def get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.prefix + key, default)
        if not isinstance(value, str | int | float | None):
            raise UnsupportedModel(f"{self.prefix}{key} is a list; plait reads one value for all layers")
        return value

    def whole(self, key: str, most: int) -> int:
        return _whole(self.prefix + key, self.get(key, None), most)

    def per_layer(self, key: str, most: int, default: int | None = None) -> int:
        """A number that a file may also give as an array with one entry per layer."""
        value = self.metadata.get(self.prefix + key, default)
        if hasattr(value, "tolist"):
            different = set(value.tolist())
            if len(different) > 1:
                raise UnsupportedModel(f"{self.prefix}{key} differs between layers; plait needs equal layers")
            value = different.pop() if different else None
        return _whole(self.prefix + key, value, most)


def _refuse_gguf_variants(metadata: Mapping[str, Any], keys: _Keys) -> None:
    if keys.get("expert_count", 0):
        raise UnsupportedModel("the model is a mixture of experts, which plait does not run")
    if keys.get("attention.clamp_kqv", 0) or keys.get("use_parallel_residual", False):
        raise UnsupportedModel("the model clamps attention or runs its blocks in parallel, unlike plait")
    split = metadata.get("split.count", 0)
    if type(split) is int and split > 1:
        raise UnsupportedModel(f"the model is split into {split} GGUF files; merge them first")


def _gguf_rope_scaling(keys: _Keys, divisors: Sequence[float] | None) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    linear = kind == "linear" or (kind == "none" and factor != 1.0)
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"the rope scaling {kind!r:.40} is not supported; there are linear and llama3")
    if divisors is not None and linear:
        raise UnsupportedModel("the model has both linear rope scaling and rope divisors; plait takes one")
    if divisors is not None:
        return RopeScaling("divisors", divisors=tuple(divisors))
    return RopeScaling("linear", factor=factor) if linear else None


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The config in a Hugging Face config.json. Raises CorruptModel or UnsupportedModel.

    >>> from_hf({"architectures": ["GPT2LMHeadModel"]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.runtime.errors.UnsupportedModel: the architecture 'GPT2LMHeadModel' is not supported; ...
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in HF_ARCHITECTURES:
        raise _unsupported(name, HF_ARCHITECTURES)
    if config.get("quantization_config") is not None:
        raise UnsupportedModel("the folder holds quantized weights; take the plain folder or a GGUF file")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"the activation {config['hidden_act']!r:.40} is not supported; there is silu")
    mistral = name == "MistralForCausalLM"
    hidden_size = _whole("hidden_size", config.get("hidden_size"), _MOST["hidden_size"])
    num_heads = _whole("num_attention_heads", config.get("num_attention_heads"), _MOST["num_heads"])
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = 8 if mistral and "num_key_value_heads" not in config else num_heads
    rope = _hf_rope(config)
    return ModelConfig(
        architecture=HF_ARCHITECTURES[name],
        vocab_size=config.get("vocab_size", 0),
        hidden_size=hidden_size,
        num_layers=config.get("num_hidden_layers", 0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=config.get("intermediate_size", 0),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        context_length=config.get("max_position_embeddings", 0),
        rope_scaling=_hf_rope_scaling(rope, config),
        tie_word_embeddings=_flag("tie_word_embeddings", config.get("tie_word_embeddings", False)),
        attention_bias=_flag("attention_bias", config.get("attention_bias", False)),
        mlp_bias=_flag("mlp_bias", config.get("mlp_bias", False)),
        sliding_window=config.get("sliding_window", 4096) if mistral else None,
    )


def _hf_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, 4 wrote `rope_scaling` with `rope_theta` beside it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CorruptModel("rope_scaling in config.json is not an object")
    return rope


def _hf_rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=rope.get("factor", 0))
    if kind != "llama3":
        raise UnsupportedModel(f"the rope scaling {kind!r:.40} is not supported; there are linear and llama3")
    return RopeScaling(
        "llama3",
        factor=rope.get("factor", 0),
        low_freq_factor=rope.get("low_freq_factor", 0),
        high_freq_factor=rope.get("high_freq_factor", 0),
        original_context_length=rope.get("original_max_position_embeddings", config.get("max_position_embeddings", 0)),
    )


def _unsupported(name: Any, supported: Mapping[str, str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the architecture {name!r:.60} is not supported; plait runs {', '.join(sorted(supported))}"
    )
