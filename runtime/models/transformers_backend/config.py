"""The config of a model for the transformers backend, and the refusals that need no weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.runtime.config import EngineConfig
from plait.runtime.errors import InputError, ModelNotFound, UnsupportedModel
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.models.value_checks import MAX_VALUES, checked_int

INSTALL = "pip install 'plait[transformers]'"
# Types of layers that keep a recurrent state, or whose mask is neither causal nor a sliding window.
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}
_OWN_ATTENTION = {"FalconForCausalLM"}  # see `model.py`
_ADVICE = "use a checkpoint of another architecture, or a server that runs this one as a plait backend"


@dataclass(frozen=True)
class TransformersConfig:
    """What the runtime needs to know of a model that transformers computes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    has_lm_head: bool = True


def require_transformers(architecture: str) -> None:
    """Imports transformers. Raises InputError, which names the extra that installs it, if that fails."""
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"{architecture} needs the package transformers, which cannot be imported ({error!s:.200}): {INSTALL}"
        ) from error


def architecture_of(folder: Path) -> str:
    """The architecture that config.json names, "" if it names none. Raises ModelError."""
    names = read_json_object(folder / "config.json").get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def load_hf_config(folder: Path) -> tuple[Any, type]:
    """transformers' config of the folder, and its model class. Code in the folder is never run.

    Raises InputError if transformers is missing and UnsupportedModel, with the reason, for models that the backend
    cannot run.
    """
    if not folder.is_dir():
        raise UnsupportedModel(f"backend='transformers' reads folders of safetensors, not {folder.name}")
    architecture = architecture_of(folder)
    require_transformers(architecture or str(folder))
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UnsupportedModel(f"{architecture!r:.60}: transformers cannot read its config: {error!s:.300}") from error
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    reason = _unsupported_reason(config, model_class, architecture)
    if reason:
        raise UnsupportedModel(f"backend='transformers' cannot run {architecture!r:.60}: {reason}; {_ADVICE}")
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{folder} has no safetensors file; weights in other formats are not read")
    assert model_class is not None
    return config, model_class


def transformers_config(config: Any, architecture: str, context_length: int) -> TransformersConfig:
    """The sizes of a model; `context_length` limits the model's own unless it is 0.

    Raises CorruptModel for sizes out of range, and InputError if no context length is known.
    """
    longest = getattr(config, "max_position_embeddings", None) or context_length
    if not longest:
        raise InputError(f"the config of {architecture} has no max_position_embeddings: set context_length")
    longest = checked_int("context_length", longest, MAX_VALUES["context_length"])
    return TransformersConfig(
        architecture=architecture,
        vocab_size=checked_int("vocab_size", config.vocab_size, MAX_VALUES["vocab_size"]),
        hidden_size=checked_int("hidden_size", config.hidden_size, MAX_VALUES["hidden_size"]),
        num_layers=checked_int("num_layers", config.num_hidden_layers, MAX_VALUES["num_layers"]),
        context_length=min(context_length or longest, longest),
    )


def check_settings(config: EngineConfig) -> None:
    """Raises InputError for settings that the transformers backend does not have."""
    if config.weights not in ("auto", "bf16"):
        raise InputError(f"backend='transformers' has no weights={config.weights!r}; it computes with weights='bf16'")
    if config.kv_dtype != "auto":
        raise InputError(f"backend='transformers' has no kv_dtype={config.kv_dtype!r}; leave it at 'auto'")
    if config.deterministic:
        raise InputError(
            "backend='transformers' has no deterministic=True: transformers' matrix products vary by batch"
        )


def _unsupported_reason(config: Any, model_class: Any, architecture: str) -> str:
    """Why the paged attention cannot run the model; "" if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and plait runs decoders only"
    if config.get_text_config() is not config:
        return "it has inputs other than text"
    if model_class is None or model_class.__name__ != architecture:
        return "it is not a causal language model of transformers"
    if (reason := _quantization_reason(config)) is not None:
        return reason
    other_types = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - _ATTENTION_TYPES)
    if other_types:
        return f"it has layers of the type {', '.join(other_types)[:100]}, whose state the KV cache does not hold"
    if getattr(model_class, "_is_stateful", False):
        return "its layers have a recurrent state, which the KV cache does not hold"
    if getattr(config, "alibi", False):
        return "it has ALiBi position biases, which the paged attention does not add"
    if not getattr(model_class, "_supports_attention_backend", False) and architecture not in _OWN_ATTENTION:
        return "its attention in transformers cannot be replaced (no attention interface)"
    rope = _rope_types(config) & _LENGTH_DEPENDENT_ROPE
    if rope:
        return f"its rope scaling ({rope.pop()}) depends on the length of a text, so cached keys would not fit"
    return ""


def _quantization_reason(config: Any) -> str | None:
    """Why the quantized weights of a folder cannot be read; None if they can. MXFP4 experts are dequantized."""
    described = getattr(config, "quantization_config", None)
    if described is None:
        return None
    fields = described if isinstance(described, dict) else described.to_dict()
    method = fields.get("quant_method")
    if getattr(method, "value", method) != "mxfp4":
        return f"its weights are quantized ({method!s:.40}); a checkpoint in MXFP4, float32, float16 or bfloat16 works"
    unknown = sorted(set(fields) - {"quant_method", "modules_to_not_convert", "dequantize"})
    return f"quantization_config.{unknown[0]:.60} is unknown to plait" if unknown else None


def _rope_types(config: Any) -> set[str]:
    """The kinds of rope scaling of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (rope, *nested)}
