"""The record that describes one model family to the rest of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.runtime.models.config import Fields
from plait.runtime.models.gguf_config import GGUFKeys, TensorDerivedFields
from plait.runtime.models.weight_shapes import LayerShapes

LayerNorms = tuple[str | None, str | None, str | None, str | None]


@dataclass(frozen=True)
class PackedLayer:
    """How a layer of the packed CPU decoder differs from Llama's, besides `ModelFamily.layer_norms`.

    - `activation`: of the gate of the MLP; "gelu" is its tanh approximation.
    - `unit_norms`: whether safetensors files store the norms' weights less 1.
    - `fused_matrices`: whether q, k and v are stored as one matrix, and gate and up as one. Only then may a part of a
      head's dimensions rotate.
    """

    activation: Literal["silu", "gelu"] = "silu"
    unit_norms: bool = False
    fused_matrices: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Names, config readers, weight shapes and decoder of one family.

    A family that leaves out what has no default cannot be imported.

    - `name`: the name of the family's folder, and the value of `ModelConfig.architecture`.
    - `hf_architectures`: the values of `architectures` in config.json. The first one is the model with an output head;
      the others are the class without it, as which embedding models are saved.
    - `gguf_architecture`: the value of `general.architecture` in GGUF files; None if llama.cpp has no name for it
      for the family. `read_gguf_config` is then None too.
    - `read_hf_config`, `read_gguf_config`: return the fields of `ModelConfig` except `architecture`. They raise
      CorruptModel or UnsupportedModel.
    - `layer_shapes`: names and shapes of the weights of one layer.
    - `decoder`: "module:Class" of the torch decoder. It is a string because reading a header must not import torch.
    - `has_packed_cpu`: whether the packed CPU decoder (`loading/cpu_weights.py`) computes this family correctly. It has
      the Llama layer with the differences of `layer_norms`, `joint_qk_norms` and `packed_layer`, and biases on q, k and
      v only. The loader raises for unused weights and for partial rotation without fused matrices; these fields must
      name all else.
    - `gguf_permuted_qk`: whether llama.cpp stores the rows of q and k with the halves of a rotary pair side by side.
    - `gguf_has_experts`: whether its GGUF files have experts, where another family has the name without experts.
    - `gguf_layer_names`: GGUF names of those modules of a layer that are not named as in Llama.
    - `hf_layer_names`: names in Hugging Face folders of those modules of a layer that are not named as in Qwen 3.
    - `layer_norms`: the names of a layer's norms, before and after attention, before and after the MLP; None: there is
      no such norm.
    - `joint_qk_norms`: whether the norms of queries and keys are over all heads of a token together, not over each one.
    - `packed_layer`: how the packed CPU decoder computes a layer, for families with `has_packed_cpu`.
    """

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architecture: str | None
    read_hf_config: Callable[[Mapping[str, Any]], Fields]
    read_gguf_config: Callable[[GGUFKeys, TensorDerivedFields], Fields] | None
    layer_shapes: LayerShapes
    decoder: str
    has_packed_cpu: bool
    gguf_permuted_qk: bool
    gguf_has_experts: bool = False
    gguf_layer_names: Mapping[str, str] = field(default_factory=dict)
    hf_layer_names: Mapping[str, str] = field(default_factory=dict)
    layer_norms: LayerNorms = ("input_layernorm", None, "post_attention_layernorm", None)
    joint_qk_norms: bool = False
    packed_layer: PackedLayer = PackedLayer()

    def __post_init__(self) -> None:
        if (self.gguf_architecture is None) != (self.read_gguf_config is None):
            raise ValueError(f"{self.name}: gguf_architecture and read_gguf_config must be given together")
        if not self.hf_architectures:
            raise ValueError(f"{self.name}: hf_architectures is empty")
