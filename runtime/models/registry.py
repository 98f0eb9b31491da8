"""Which families plait runs: one line each, and how a file's config finds its own.

Knows: names. Must not know: what a family does; which decoder runs it, `decoders` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.runtime.errors import UnsupportedModel
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.families.gemma3.config import FAMILY as GEMMA3
from plait.runtime.models.families.llama.config import FAMILY as LLAMA
from plait.runtime.models.families.mistral.config import FAMILY as MISTRAL
from plait.runtime.models.families.phi3.config import FAMILY as PHI3
from plait.runtime.models.families.qwen2.config import FAMILY as QWEN2
from plait.runtime.models.families.qwen3.config import FAMILY as QWEN3
from plait.runtime.models.families.qwen3_moe.config import FAMILY as QWEN3_MOE
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.loading.gguf_config import GGUFKeys, TensorDerivedFields

FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA3,
    PHI3,
)

FAMILIES_BY_NAME: dict[str, ModelFamily] = {family.name: family for family in FAMILIES}
_BY_HF = {family.hf: family for family in FAMILIES}
_BY_BASE = {family.base: family for family in FAMILIES}  # saved without an output head, as embedding models are
_BY_GGUF = {family.gguf_architecture: family for family in FAMILIES if family.gguf_architecture is not None}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The config in a Hugging Face config.json. Raises CorruptModel or UnsupportedModel.

    >>> config_from_hf({"architectures": ["GPT2LMHeadModel"]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.runtime.errors.UnsupportedModel: the architecture 'GPT2LMHeadModel' is not supported; ...
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = (_BY_HF | _BY_BASE).get(name) if isinstance(name, str) else None
    if family is None:
        raise _unsupported(name, _BY_HF)
    return family.read_hf_config(config)


def config_from_gguf(metadata: Mapping[str, Any], tensor_fields: TensorDerivedFields | None = None) -> ModelConfig:
    """The config in a GGUF's metadata; `tensor_fields` is what only the file's tensors tell.

    Raises CorruptModel or UnsupportedModel.
    """
    name = metadata.get("general.architecture")
    family = _BY_GGUF.get(name) if isinstance(name, str) else None
    if family is None or family.read_gguf_config is None:
        raise _unsupported(name, _BY_GGUF)
    return family.read_gguf_config(GGUFKeys(metadata), tensor_fields or TensorDerivedFields())


def _unsupported(name: Any, supported: Iterable[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the architecture {name!r:.60} is not supported; plait runs {', '.join(sorted(supported))}"
    )
