"""The record that describes one model family to the rest of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.runtime.models.config import Fields
from plait.runtime.models.gguf_config import GGUFKeys, TensorDerivedFields

LayerNorms = tuple[str | None, str | None, str | None, str | None]


@dataclass(frozen=True)
class LayerForm:
    """How a family's layer differs from Llama's. Its weights, both decoders and adapters follow from it.

    - `norms`: the names of the norms before and after attention, before and after the MLP; None: there is no such norm.
    - `qk_norms`: whether queries and keys are normed, and over each head or over all heads of a token together.
    - `activation`: of the gate of the MLP; "gelu" is its tanh approximation.
    - `float32_norms`: norms multiply by their weight before they round to the model's dtype, not after it.
    - `unit_norms`: safetensors files store the norms' weights less 1. GGUF files store the sum.
    - `fused_matrices`: q, k and v are stored as one matrix, and gate and up as one. Only then may a part of a head's
      dimensions rotate.
    - `rounds_embedding_scale`: the factor of embeddings is rounded to the model's dtype, as in training.
    - `overflows_float16`: activations do not fit float16.
    """

    norms: LayerNorms = ("input_layernorm", None, "post_attention_layernorm", None)
    qk_norms: Literal["heads", "joint"] | None = None
    activation: Literal["silu", "gelu"] = "silu"
    float32_norms: bool = False
    unit_norms: bool = False
    fused_matrices: bool = False
    rounds_embedding_scale: bool = False
    overflows_float16: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Names, config readers and layer of one family.

    A family that leaves out what has no default cannot be imported.

    - `name`: the value of `ModelConfig.architecture`.
    - `hf_architectures`: the values of `architectures` in config.json. The first one is the model with an output head;
      the others are the class without it, as which embedding models are saved.
    - `gguf_architecture`: the value of `general.architecture` in GGUF files; None if llama.cpp has no name for it
      for the family. `read_gguf_config` is then None too.
    - `read_hf_config`, `read_gguf_config`: return the fields of `ModelConfig` except `architecture`. They raise
      CorruptModel or UnsupportedModel.
    - `gguf_permuted_qk`: whether llama.cpp stores the rows of q and k with the halves of a rotary pair side by side.
    - `gguf_has_experts`: whether its GGUF files have experts, where another family has the name without experts.
    - `gguf_layer_names`: GGUF names of those modules of a layer that are not named as in Llama.
    - `hf_layer_names`: names in Hugging Face folders of those modules of a layer that are not named as in Qwen 3.
    - `layer`: how a layer differs from Llama's.
    """

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architecture: str | None
    read_hf_config: Callable[[Mapping[str, Any]], Fields]
    read_gguf_config: Callable[[GGUFKeys, TensorDerivedFields], Fields] | None
    gguf_permuted_qk: bool
    gguf_has_experts: bool = False
    gguf_layer_names: Mapping[str, str] = field(default_factory=dict)
    hf_layer_names: Mapping[str, str] = field(default_factory=dict)
    layer: LayerForm = LayerForm()

    def __post_init__(self) -> None:
        if (self.gguf_architecture is None) != (self.read_gguf_config is None):
            raise ValueError(f"{self.name}: gguf_architecture and read_gguf_config must be given together")
        if not self.hf_architectures:
            raise ValueError(f"{self.name}: hf_architectures is empty")
