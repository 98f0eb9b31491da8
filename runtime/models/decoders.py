"""Which decoder runs a family, by torch.

Knows: classes. Must not know: configs, files. Apart from `registry`, so that reading a model's header needs no torch.
"""

from __future__ import annotations

from plait.runtime.models.decoder import Decoder
from plait.runtime.models.families.gemma3.layers import Gemma3Decoder
from plait.runtime.models.families.phi3.layers import Phi3Decoder
from plait.runtime.models.families.qwen3_moe.layers import Qwen3MoeDecoder

MODELS: dict[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
    "qwen3_moe": Qwen3MoeDecoder,
    "gemma3": Gemma3Decoder,
    "phi3": Phi3Decoder,
}
