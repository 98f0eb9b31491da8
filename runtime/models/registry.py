"""The list of model families, and the lookup of a file's family.

To add a family, define its `ModelFamily` in a module of families/, and add it to FAMILIES.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.runtime.errors import UnsupportedModel
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.families import gemma, granite, llama, olmo2, phi3, qwen, smollm3
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.gguf_config import GGUFKeys, TensorDerivedFields

FAMILIES = (
    llama.LLAMA,
    llama.MISTRAL,
    qwen.QWEN2,
    qwen.MIMO,
    qwen.QWEN3,
    qwen.QWEN3_MOE,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.PHI3,
    smollm3.SMOLLM3,
    granite.GRANITE,
    llama.MIXTRAL,
    olmo2.OLMO2,
)


def index_families(names_and_families: Iterable[tuple[str, ModelFamily]]) -> dict[str, ModelFamily]:
    """Families by name. Raises ValueError if two families have one name."""
    index: dict[str, ModelFamily] = {}
    for name, family in names_and_families:
        if name in index:
            raise ValueError(f"the families {index[name].name} and {family.name} both claim the name {name!r}")
        index[name] = family
    return index


FAMILIES_BY_NAME = index_families((family.name, family) for family in FAMILIES)
_BY_HF_ARCHITECTURE = index_families((name, family) for family in FAMILIES for name in family.hf_architectures)
_BY_GGUF_ARCHITECTURE, _EXPERTS_BY_GGUF_ARCHITECTURE = (
    index_families(
        (family.gguf_architecture, family)
        for family in FAMILIES
        if family.gguf_architecture is not None and family.gguf_has_experts == has_experts
    )
    for has_experts in (False, True)
)


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model's config from the contents of a Hugging Face config.json. Raises CorruptModel or UnsupportedModel.

    >>> config_from_hf({"architectures": ["GPT2LMHeadModel"]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    plait.runtime.errors.UnsupportedModel: the architecture 'GPT2LMHeadModel' is not supported; ...
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = _BY_HF_ARCHITECTURE.get(name) if isinstance(name, str) else None
    if family is None:
        raise _unsupported(name, (family.hf_architectures[0] for family in FAMILIES))
    return ModelConfig(architecture=family.name, **family.read_hf_config(config))


def has_family(architecture: str) -> bool:
    """Whether a family computes this architecture of a Hugging Face folder."""
    return architecture in _BY_HF_ARCHITECTURE


def config_from_gguf(metadata: Mapping[str, Any], tensor_fields: TensorDerivedFields | None = None) -> ModelConfig:
    """The model's config from a GGUF file's metadata and, in `tensor_fields`, from its list of tensors.

    Raises CorruptModel or UnsupportedModel.
    """
    name = metadata.get("general.architecture")
    family = None
    if isinstance(name, str):
        num_experts = metadata.get(f"{name}.expert_count")
        has_experts = isinstance(num_experts, int) and num_experts > 0
        family = _EXPERTS_BY_GGUF_ARCHITECTURE.get(name) if has_experts else None
        family = family or _BY_GGUF_ARCHITECTURE.get(name)
    if family is None or family.read_gguf_config is None:
        raise _unsupported(name, _BY_GGUF_ARCHITECTURE)
    fields = family.read_gguf_config(GGUFKeys(metadata), tensor_fields or TensorDerivedFields())
    return ModelConfig(architecture=family.name, **fields)


def _unsupported(name: Any, supported: Iterable[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the architecture {name!r:.60} is not supported; plait runs {', '.join(sorted(supported))}"
    )
