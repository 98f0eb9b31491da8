"""The config.json of an EAGLE-3 head, checked against the model whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.runtime.errors import InputError
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.hf_config import common_fields
from plait.runtime.models.value_checks import checked_bool, checked_int

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_STATES = 3  # hidden states of the model that are joined
_ABSENT = ("attention_bias", "mlp_bias", "tie_word_embeddings", "norm_before_fc", "parallel_drafting")


@dataclass(frozen=True)
class Eagle3Config:
    """A head's sizes.

    layer: of its only layer, with the model's vocabulary. model_size: of the model's hidden states. draft_vocab_size:
    of its own output head. captured: the layers of the model before which the residual stream is read, low to high.
    norms_residual: whether the normed hidden state goes on as the residual, and not the hidden state itself.
    """

    layer: ModelConfig
    model_size: int
    draft_vocab_size: int
    captured: tuple[int, ...]
    norms_residual: bool


def is_eagle3(path: Path) -> bool:
    """Whether a path is a folder whose config.json is of an EAGLE-3 head. Raises CorruptModel."""
    if not (path / "config.json").is_file():
        return False
    return read_json_object(path / "config.json").get("architectures") == [ARCHITECTURE]


def read_eagle3_config(folder: Path, model: ModelConfig) -> Eagle3Config:
    """Returns the config of the head in a folder.

    Raises CorruptModel or UnsupportedModel, and InputError for a head of another model, which name the field.
    """
    described = read_json_object(folder / "config.json")
    settings = described.get("eagle_config")
    settings = settings if isinstance(settings, Mapping) else {}
    for name in _ABSENT:
        if described.get(name) or settings.get(name):
            raise InputError(f"draft: an EAGLE-3 head with {name} is not supported")
    if settings.get("use_aux_hidden_state") is False:
        raise InputError("draft: use_aux_hidden_state is false, so this is no EAGLE-3 head")
    layer = ModelConfig(architecture="llama", **common_fields(described))
    model_size = described.get("target_hidden_size") or layer.hidden_size
    for name, of_head, of_model in (
        ("num_hidden_layers", layer.num_layers, 1),
        ("vocab_size", layer.vocab_size, model.vocab_size),
        ("target_hidden_size", model_size, model.hidden_size),
    ):
        if of_head != of_model:
            raise InputError(f"draft: the EAGLE-3 head has {name} {of_head!r:.40}, not {of_model}, so it does not fit")
    return Eagle3Config(
        layer,
        model.hidden_size,
        checked_int("draft_vocab_size", described.get("draft_vocab_size") or layer.vocab_size, layer.vocab_size),
        _captured_layers(settings.get("eagle_aux_hidden_state_layer_ids"), model.num_layers),
        checked_bool("norm_before_residual", {**settings, **described}.get("norm_before_residual", False)),
    )


def head_cache_bytes(folder: Path, num_tokens: int) -> int:
    """Returns the bytes of so many tokens' keys and values, and of the weights beyond those of the files."""
    fields: dict[str, Any] = common_fields(read_json_object(folder / "config.json"))
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # float32, of files in 16 bits
    return int(num_tokens * 8 * fields["num_kv_heads"] * fields["head_dim"]) + weights


def _captured_layers(stated: Any, num_layers: int) -> tuple[int, ...]:
    """The layers behind the stated ones, whose outputs are meant; else the third, the middle one and the third last.

    Heads without stated layers are trained on these. SGLang, for which the folders are published, reads the ids so: a
    head for 94 layers states 1, 46 and 90, and means the states before 2, 47 and 91.
    """
    if stated is None:
        stated = [1, num_layers // 2 - 1, num_layers - 4]
    if not isinstance(stated, list) or len(stated) != NUM_STATES:
        raise InputError(f"draft: eagle_aux_hidden_state_layer_ids must be {NUM_STATES} layers, not {stated!r:.60}")
    for layer in stated:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers - 1:
            raise InputError(
                f"draft: eagle_aux_hidden_state_layer_ids has {layer!r:.40}; a model with {num_layers} layers hands out"
                f" the outputs of the layers 0 to {num_layers - 2}"
            )
    return tuple(layer + 1 for layer in stated)
