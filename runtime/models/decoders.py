"""Which decoder runs a family, by torch.

Knows: classes. Must not know: configs, files. Apart from `registry`, so that reading a model's header needs no torch.
"""

from __future__ import annotations

from plait.runtime.models.decoder import Decoder
from plait.runtime.models.gemma3_decoder import Gemma3Model
from plait.runtime.models.phi3_decoder import Phi3Model
from plait.runtime.models.qwen3_moe_decoder import Qwen3MoeModel

MODELS: dict[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
    "qwen3_moe": Qwen3MoeModel,
    "gemma3": Gemma3Model,
    "phi3": Phi3Model,
}
