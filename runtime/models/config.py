"""The shape of a decoder-only model: one frozen record, all of it checked.

Knows: names, ranges, what contradicts what. Must not know: torch, tensors, files and their spelling.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.runtime.errors import CorruptModel
from plait.runtime.models.checks import MOST, flag, real, whole
from plait.runtime.models.rope import RopeScaling, check_scaling, frequencies


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: each token goes through the `per_token` experts of `count` that a router ranks highest.

    `normalize`: the weights of those chosen are scaled to add up to 1. `layers`: which layers have experts;
    the others have one MLP of the model's `intermediate_size`.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Everything a forward pass must know about a model besides its weights.

    `attention_bias`: q, k and v have a bias each; `output_bias`: o has; `mlp_bias`: gate, up and down have.
    `sliding_window`: the number of latest positions a query sees, None for all; it holds in the layers that
    `sliding_layers` marks, in all of them if that is empty. `local_rope_theta`: the rotary base of those layers,
    where it is another. `rotary_dim`: leading dimensions of a head that rotate, 0 for all. `attention_scale`: what
    scores are multiplied by, 0 for 1 / sqrt(head_dim). `has_head`: False where the files hold no output head: the
    embedding stands in its place, and no text can be generated. Raises CorruptModel where numbers contradict.
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
    local_rope_theta: float | None = None
    rotary_dim: int = 0
    attention_scale: float = 0.0
    experts: ExpertsConfig | None = None
    has_head: bool = True

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if name != "num_experts":
                whole(name, getattr(self, name), most)
        if self.sliding_window is not None:
            whole("sliding_window", self.sliding_window, MOST["context_length"])
        real("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)
        if self.num_heads % self.num_kv_heads:
            raise CorruptModel(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads")
        if len(self.sliding_layers) not in (0, self.num_layers):
            raise CorruptModel(f"{len(self.sliding_layers)} attention types for {self.num_layers} layers")
        if self.attention_scale:
            real("attention scale", self.attention_scale, 0.0, 1e6)
        self._check_rotary()
        if self.experts is not None:
            _check_experts(self.experts, self.num_layers)

    def _check_rotary(self) -> None:
        real("rope_theta", self.rope_theta, 1.0, 1e15)
        if self.local_rope_theta is not None:
            real("rope theta of local layers", self.local_rope_theta, 1.0, 1e15)
        if self.head_dim % 2 or self.num_rotary % 2:
            raise CorruptModel(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")
        if self.num_rotary > self.head_dim:
            raise CorruptModel(f"{self.num_rotary} rotary dimensions in heads of {self.head_dim}")
        if self.rope_scaling is not None:
            check_scaling(self.rope_scaling, self.num_rotary)

    @property
    def num_rotary(self) -> int:
        """Dimensions of a head that rotate."""
        return whole("rotary dimensions", self.rotary_dim or self.head_dim, MOST["head_dim"])

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    def is_local(self, layer: int) -> bool:
        """Whether the sliding window holds in this layer."""
        return self.sliding_window is not None and (not self.sliding_layers or self.sliding_layers[layer])

    def window(self, layer: int) -> int | None:
        """The number of latest positions a query of this layer sees, None for all."""
        return self.sliding_window if self.is_local(layer) else None

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each rotary pair, [num_rotary / 2], scaling included."""
        return frequencies(self.rope_theta, self.num_rotary, self.rope_scaling, self.context_length)

    def local_frequencies(self) -> tuple[float, ...]:
        """The same of the local layers, where they have a base of their own; never scaled (Gemma 3)."""
        theta = self.rope_theta if self.local_rope_theta is None else self.local_rope_theta
        return frequencies(theta, self.num_rotary, None, self.context_length)


def _check_experts(experts: ExpertsConfig, num_layers: int) -> None:
    whole("number of experts", experts.count, MOST["num_experts"])
    whole("experts per token", experts.per_token, experts.count)
    whole("experts' intermediate_size", experts.intermediate_size, MOST["intermediate_size"])
    flag("norm_topk_prob", experts.normalize)
    if len(experts.layers) != num_layers or not any(experts.layers):
        raise CorruptModel("the layers that have experts are not named, or there are none")
