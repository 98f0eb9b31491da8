"""SmolLM3: Llama's layer, without rotary embeddings in every fourth one (arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.runtime.errors import CorruptModel
from plait.runtime.models import gguf_config, hf_config
from plait.runtime.models.config import Fields
from plait.runtime.models.family import ModelFamily
from plait.runtime.models.value_checks import MAX_VALUES, checked_bool, checked_int

INTERVAL = 4  # of the layers without rotary embeddings, where the files do not name it


def read_hf_config(config: Mapping[str, Any]) -> Fields:
    fields = hf_config.common_fields({"tie_word_embeddings": True, **config})
    num_layers = fields["num_layers"]
    windowed = checked_bool("use_sliding_window", config.get("use_sliding_window", False))
    return dict(
        **fields,
        **hf_config.all_biases(config),
        sliding_window=config.get("sliding_window") if windowed else None,
        sliding_layers=hf_config.layer_types(config, num_layers, lambda layer: True) if windowed else (),
        unrotated_layers=_unrotated_layers(config, num_layers),
    )


def _unrotated_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """From `no_rope_layers`, whose entry is 0 for a layer without rotary embeddings, or else from their interval."""
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.get("no_rope_layer_interval", INTERVAL)
        step = checked_int("no_rope_layer_interval", interval, MAX_VALUES["num_layers"])
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))
    if not isinstance(listed, list) or any(entry not in (0, 1) for entry in listed):
        raise CorruptModel("no_rope_layers in config.json is not a list of 0 and 1")
    return tuple(entry == 0 for entry in listed)


def read_gguf_config(keys: gguf_config.GGUFKeys, tensor_fields: gguf_config.TensorDerivedFields) -> Fields:
    fields = gguf_config.common_fields(keys, tensor_fields)
    unrotated = tuple((layer + 1) % INTERVAL == 0 for layer in range(fields["num_layers"]))  # not in the file
    return dict(**fields, unrotated_layers=unrotated)


SMOLLM3 = ModelFamily(
    name="smollm3",
    hf_architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    gguf_architecture="smollm3",
    read_hf_config=read_hf_config,
    read_gguf_config=read_gguf_config,
    gguf_permuted_qk=True,
)
