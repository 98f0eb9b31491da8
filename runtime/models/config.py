"""The configuration of a decoder-only model, checked when it is constructed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.runtime.errors import CorruptModel
from plait.runtime.models.rope import RopeScaling, check_rope_scaling, rope_inverse_frequencies
from plait.runtime.models.value_checks import MAX_VALUES, checked_bool, checked_float, checked_int

Fields = dict[str, Any]  # fields of ModelConfig by name, as the families' readers return them


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: a router sends each token to `experts_per_token` of the experts.

    `intermediate_size`: of one expert. `normalize_topk`: whether the weights of the selected experts are scaled to
    sum to 1. `layers`: for each layer, whether it has experts; the others have one MLP of the model's
    `intermediate_size`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_topk: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """All parameters of a model that the forward pass needs besides the weights.

    - `architecture`: the name of the family (`registry.FAMILIES`).
    - `attention_bias`: q, k and v have biases; `output_bias`: o has one; `mlp_bias`: gate, up and down have.
    - `sliding_window`: a query attends to this many latest positions, its own included; None for all. It applies to the
      layers that `sliding_layers` marks, or to all layers if that is empty.
    - `sliding_rope_theta`: the rotary base of the layers with a window, if it differs from `rope_theta`.
    - `rotary_dim`: the number of leading dimensions of a head that rotate; 0 for all.
    - `unrotated_layers`: marks the layers without rotary embeddings; empty if there are none.
    - `attention_scale`: the factor of attention scores; 0 for 1 / sqrt(head_dim).
    - `embedding_scale`, `logit_scale`: the factors of embeddings and of logits.
    - `attention_softcap`, `logit_softcap`: a score or logit x becomes cap * tanh(x / cap); 0: it stays as it is.
    - `num_mtp_layers`: multi-token-prediction layers that the files have beside the model's own.
    - `has_lm_head`: False if the files have no output head. The embedding then takes its place, and the model can
      embed texts but not generate.

    The constructor raises CorruptModel for values out of range and for values that contradict each other.
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
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope_theta: float | None = None
    rotary_dim: int = 0
    unrotated_layers: tuple[bool, ...] = ()
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    experts: MoEConfig | None = None
    num_mtp_layers: int = 0
    has_lm_head: bool = True

    def __post_init__(self) -> None:
        for name, maximum in MAX_VALUES.items():
            if name != "num_experts":
                checked_int(name, getattr(self, name), maximum)
        if self.sliding_window is not None:
            checked_int("sliding_window", self.sliding_window, MAX_VALUES["context_length"])
        checked_float("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)
        if self.num_heads % self.num_kv_heads:
            raise CorruptModel(f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads")
        for marks, name in (
            (self.sliding_layers, "attention types"),
            (self.unrotated_layers, "marks of rotary layers"),
        ):
            if len(marks) not in (0, self.num_layers):
                raise CorruptModel(f"{len(marks)} {name} for {self.num_layers} layers")
        if self.attention_scale:
            checked_float("attention scale", self.attention_scale, 0.0, 1e6)
        checked_float("embedding scale", self.embedding_scale, 0.0, 1e6)
        checked_float("logit scale", self.logit_scale, 0.0, 1e6)
        for name in ("attention_softcap", "logit_softcap"):
            if getattr(self, name):
                checked_float(name, getattr(self, name), 0.0, 1e6)
        self._check_rotary()
        if self.experts is not None:
            _check_experts(self.experts, self.num_layers)

    def _check_rotary(self) -> None:
        checked_float("rope_theta", self.rope_theta, 1.0, 1e15)
        if self.sliding_rope_theta is not None:
            checked_float("rope theta of local layers", self.sliding_rope_theta, 1.0, 1e15)
        if self.head_dim % 2 or self.effective_rotary_dim % 2:
            raise CorruptModel(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.effective_rotary_dim > self.head_dim:
            raise CorruptModel(f"{self.effective_rotary_dim} rotary dimensions in heads of {self.head_dim}")
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling, self.effective_rotary_dim)

    @property
    def effective_rotary_dim(self) -> int:
        """The number of dimensions of a head that rotate."""
        return checked_int("rotary dimensions", self.rotary_dim or self.head_dim, MAX_VALUES["head_dim"])

    @property
    def softmax_scale(self) -> float:
        """The factor of attention scores."""
        return self.attention_scale or self.head_dim**-0.5

    def is_sliding(self, layer: int) -> bool:
        """Whether the layer has a sliding window."""
        return self.sliding_window is not None and (not self.sliding_layers or self.sliding_layers[layer])

    def window(self, layer: int) -> int | None:
        """The number of latest positions that a query of this layer attends to; None for all."""
        return self.sliding_window if self.is_sliding(layer) else None

    def rope_table(self, layer: int) -> int:
        """The index of the layer's rotary frequencies in `rope_frequencies`."""
        if self.unrotated_layers and self.unrotated_layers[layer]:
            return len(self.rope_frequencies()) - 1
        return int(self.is_sliding(layer) and self.sliding_rope_theta is not None)

    def rope_frequencies(self) -> list[tuple[tuple[float, ...], float]]:
        """Radians per position of the rotating pairs, and the factor of their cos and sin: those of most layers, those
        of layers with a window and a rotary base of their own, and those of layers without rotary embeddings."""
        frequencies = [(self.inverse_frequencies(), self.rope_scaling.attention_factor if self.rope_scaling else 1.0)]
        if self.sliding_rope_theta is not None:
            frequencies.append((self.sliding_inverse_frequencies(), 1.0))
        if any(self.unrotated_layers):
            frequencies.append(((), 1.0))
        return frequencies

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each rotary pair, [effective_rotary_dim / 2], scaling included."""
        return rope_inverse_frequencies(
            self.rope_theta, self.effective_rotary_dim, self.rope_scaling, self.context_length
        )

    def sliding_inverse_frequencies(self) -> tuple[float, ...]:
        """The same for the layers with a sliding window. They are never scaled (Gemma 3)."""
        theta = self.rope_theta if self.sliding_rope_theta is None else self.sliding_rope_theta
        return rope_inverse_frequencies(theta, self.effective_rotary_dim, None, self.context_length)


def _check_experts(experts: MoEConfig, num_layers: int) -> None:
    checked_int("number of experts", experts.num_experts, MAX_VALUES["num_experts"])
    checked_int("experts per token", experts.experts_per_token, experts.num_experts)
    checked_int("experts' intermediate_size", experts.intermediate_size, MAX_VALUES["intermediate_size"])
    checked_bool("norm_topk_prob", experts.normalize_topk)
    if len(experts.layers) != num_layers or not any(experts.layers):
        raise CorruptModel("the list of expert layers is empty, or its length differs from the number of layers")
