"""The config.json of an EAGLE-3 head, checked against the model whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.runtime.errors import CorruptModel, InputError, ModelError
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.draft_heads.config import HeadConfig, cache_bytes
from plait.runtime.models.hf_config import common_fields
from plait.runtime.models.value_checks import MAX_VALUES, checked_bool, checked_int

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_STATES = 3  # hidden states of the model that are joined
_ABSENT = ("attention_bias", "mlp_bias", "tie_word_embeddings", "norm_before_fc", "parallel_drafting")


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """A head's sizes.

    draft_vocab_size: of its own output head. norms_residual: whether the normed hidden state goes on as the residual,
    and not the hidden state itself.
    """

    draft_vocab_size: int
    norms_residual: bool


def is_eagle3(path: Path) -> bool:
    """Whether a path is a folder whose config.json is of an EAGLE-3 head. Raises CorruptModel."""
    if not (path / "config.json").is_file():
        return False
    return read_json_object(path / "config.json").get("architectures") == [ARCHITECTURE]


def read_eagle3_config(folder: Path, model: ModelConfig, max_length: int) -> Eagle3Config:
    """Returns the config of the head in a folder, for texts of at most `max_length` tokens.

    Raises CorruptModel or UnsupportedModel, and InputError for a head of another model, which name the field.
    """
    described, layer = _read_layer(folder)
    for name in _ABSENT:
        if described.get(name):
            raise InputError(f"draft: an EAGLE-3 head with {name} is not supported")
    if described.get("use_aux_hidden_state") is False:
        raise InputError("draft: use_aux_hidden_state is false, so this is no EAGLE-3 head")
    model_size = _model_size(described, layer)
    for name, of_head, of_model in (
        ("num_hidden_layers", layer.num_layers, 1),
        ("vocab_size", layer.vocab_size, model.vocab_size),
        ("target_hidden_size", model_size, model.hidden_size),
    ):
        if of_head != of_model:
            raise InputError(f"draft: the EAGLE-3 head has {name} {of_head!r:.40}, not {of_model}, so it does not fit")
    return Eagle3Config(
        replace(layer, context_length=min(layer.context_length, max_length)),
        model.hidden_size,
        _captured_layers(described.get("eagle_aux_hidden_state_layer_ids"), model.num_layers),
        checked_int("draft_vocab_size", described.get("draft_vocab_size") or layer.vocab_size, layer.vocab_size),
        checked_bool("norm_before_residual", described.get("norm_before_residual", False)),
    )


def head_cache_bytes(folder: Path, num_tokens: int) -> int:
    """Returns `cache_bytes` of the head in a folder, and the bytes of its weights beyond those of the files.

    Raises ModelError.
    """
    described, layer = _read_layer(folder)
    model_size = checked_int("target_hidden_size", _model_size(described, layer), MAX_VALUES["hidden_size"])
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # float32, of files in 16 bits
    return cache_bytes(layer, num_tokens, NUM_STATES * model_size) + weights


def _model_size(described: Mapping[str, Any], layer: ModelConfig) -> Any:
    return described.get("target_hidden_size") or layer.hidden_size


def _read_layer(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """The fields of config.json, with those of `eagle_config` among them, and the config of the layer."""
    try:
        described = read_json_object(folder / "config.json")
        layer = ModelConfig(architecture="llama", **common_fields(described))
    except ModelError as error:
        raise type(error)(f"draft: {error}") from None
    settings = described.get("eagle_config") or {}
    if not isinstance(settings, Mapping):
        raise CorruptModel("draft: eagle_config of the EAGLE-3 head is not an object")
    return {**settings, **described}, layer


def _captured_layers(stated: Any, num_layers: int) -> tuple[int, ...]:
    """The stated layers; else the third, the middle one and the third last, which heads are trained on.

    Heads state either these numbers or those of the layers whose output it is, one less; the first is 2 or 1 then.
    """
    if stated is None:
        stated = [2, num_layers // 2, num_layers - 3]
    if not isinstance(stated, list) or len(stated) != NUM_STATES:
        raise InputError(f"draft: eagle_aux_hidden_state_layer_ids must be {NUM_STATES} layers, not {stated!r:.60}")
    for layer in stated:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers - (stated[0] == 1):
            raise InputError(
                f"draft: eagle_aux_hidden_state_layer_ids has {layer!r:.40}; the model has {num_layers} layers"
            )
    return tuple(layer + (stated[0] == 1) for layer in stated)
