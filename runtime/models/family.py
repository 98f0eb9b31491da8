"""What a model family is to the rest of the runtime: its names, how its config is read, which weights it needs.

Knows: the record. Must not know: any one family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.runtime.models.config import ModelConfig
from plait.runtime.models.loading.gguf_config import GGUFKeys, TensorDerivedFields
from plait.runtime.models.weight_shapes import LayerShapes


@dataclass(frozen=True)
class ModelFamily:
    """`name` is also what ModelConfig.architecture says.

    `hf` and `gguf_architecture`: what the two kinds of files call it; `hf_base` where the model without an output head is not called
    as the others are. `gguf_layer_names`: modules of a layer that GGUF calls otherwise
    than in Llama. `gguf_permuted_qk`: llama.cpp stores the rows of q and k with rotary pairs side by side.
    """

    name: str
    hf: str
    gguf_architecture: str | None
    read_hf_config: Callable[[Mapping[str, Any]], ModelConfig]
    read_gguf_config: Callable[[GGUFKeys, TensorDerivedFields], ModelConfig] | None
    layer_shapes: LayerShapes
    gguf_layer_names: Mapping[str, str] = field(default_factory=dict)
    gguf_permuted_qk: bool = False
    hf_base: str | None = None

    @property
    def base(self) -> str:
        """What transformers calls the model without an output head."""
        return self.hf_base or self.hf.replace("ForCausalLM", "Model")
