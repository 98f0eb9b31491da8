"""Which families plait runs: one line each, and how a file's config finds its own.

Knows: names. Must not know: what a family does; which decoder runs it, `decoders` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.runtime.errors import UnsupportedModel
from plait.runtime.models.gemma3 import FAMILY as GEMMA3
from plait.runtime.models.llama import FAMILY as LLAMA
from plait.runtime.models.mistral import FAMILY as MISTRAL
from plait.runtime.models.phi3 import FAMILY as PHI3
from plait.runtime.models.qwen2 import FAMILY as QWEN2
from plait.runtime.models.qwen3 import FAMILY as QWEN3
from plait.runtime.models.qwen3_moe import FAMILY as QWEN3_MOE
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.family import Family
from plait.runtime.models.gguf_config import Keys, TensorFacts

FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA3,
    PHI3,
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}
_BY_HF = {family.hf: family for family in FAMILIES}
_BY_BASE = {family.base: family for family in FAMILIES}  # saved without an output head, as embedding models are
_BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf is not None}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The config in a Hugging Face config.json. Raises CorruptModel or UnsupportedModel.

    >>> from_hf({"architectures": ["GPT2LMHeadModel"]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.runtime.errors.UnsupportedModel: the architecture 'GPT2LMHeadModel' is not supported; ...
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = (_BY_HF | _BY_BASE).get(name) if isinstance(name, str) else None
    if family is None:
        raise _unsupported(name, _BY_HF)
    return family.read_hf(config)


def from_gguf(metadata: Mapping[str, Any], facts: TensorFacts | None = None) -> ModelConfig:
    """The config in a GGUF's metadata; `facts` is what only the file's tensors tell.

    Raises CorruptModel or UnsupportedModel.
    """
    name = metadata.get("general.architecture")
    family = _BY_GGUF.get(name) if isinstance(name, str) else None
    if family is None or family.read_gguf is None:
        raise _unsupported(name, _BY_GGUF)
    return family.read_gguf(Keys(metadata), facts or TensorFacts())


def _unsupported(name: Any, supported: Iterable[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the architecture {name!r:.60} is not supported; plait runs {', '.join(sorted(supported))}"
    )
