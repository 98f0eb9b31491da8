"""Reads adapters as the package peft saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from plait.runtime.adapters.adapter import Adapter, LowRankUpdate, modules_of
from plait.runtime.arrays import Float32Array
from plait.runtime.errors import CorruptModel, InputError, ModelNotFound
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.model_files.safetensors_bytes import BYTES, SafetensorsBytes, widen
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_BYTES = 1 << 34
_PREFIXES = ("base_model.model.", "base_model.")
# Fields of adapter_config.json that say how an adapter was trained or found, not what it computes.
_WITHOUT_EFFECT = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "peft_type",
        "peft_version",
    ),
    *("lora_dropout", "init_lora_weights", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "runtime_config", "qalora_group_size", "lora_ga_config", "ensure_weight_tying"),
}
# Those that say where the tensors belong, which the tensors' own names say too.
_TOLD_BY_NAMES = {
    *("target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "bias", "lora_bias"),
}
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
# Initial values with which peft changes the model's own weights, unless the adapter was converted when it was saved.
_CHANGING_THE_BASE = re.compile("pissa|olora|corda|loftq|lora_ga")


def read_peft_folder(name: str, folder: Path, config: ModelConfig, shapes: WeightShapes) -> Adapter:
    """The adapter in a folder, for a model of this config and these weights (`expected_shapes`).

    Raises ModelNotFound if a file is missing, CorruptModel if one is damaged, and InputError for an adapter of another
    kind or model, which names the field or tensor.
    """
    fields = read_json_object(folder / CONFIG)
    _check_fields(name, fields)
    tensors = _read_tensors(folder / WEIGHTS)
    modules = frozenset(modules_of(config, FAMILIES_BY_NAME[config.architecture]))
    parts: dict[str, dict[str, Float32Array]] = {}
    for stored_name, tensor in tensors.items():
        module, part = _split_name(name, stored_name)
        if module not in modules:
            raise InputError(f"the adapter {name!r} changes {module}, which plait cannot adapt in this model")
        parts.setdefault(module, {})[part] = tensor
    updates = {module: _update(name, module, of_module, fields) for module, of_module in parts.items()}
    return Adapter.of(name, updates, shapes)


def _check_fields(name: str, fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise InputError(f"the adapter {name!r} is of the type {fields.get('peft_type')!r}; plait has LORA")
    if _CHANGING_THE_BASE.match(str(fields.get("init_lora_weights"))):
        raise InputError(
            f"the adapter {name!r} was saved with init_lora_weights={fields['init_lora_weights']!r}, which changes the "
            "model's weights too; save it with path_initial_model_for_weight_conversion"
        )
    for field, value in fields.items():
        if field not in _WITHOUT_EFFECT | _TOLD_BY_NAMES | _READ and value not in (None, False, [], {}, ""):
            raise InputError(f"the adapter {name!r} has {field}={value!r:.60}, which plait does not support")
    for field in ("r", "lora_alpha"):
        if isinstance(fields.get(field), bool) or not isinstance(fields.get(field), int | float):
            raise CorruptModel(f"{CONFIG} of the adapter {name!r} does not say {field!r}")


def _read_tensors(path: Path) -> dict[str, Float32Array]:
    """All tensors of a file in float32."""
    if not path.is_file():
        others = [other.name for other in path.parent.glob("adapter_model.*")]
        kept = f" (plait does not read {others[0]}, which can run code)" if others else ""
        raise ModelNotFound(f"{path.parent} has no {path.name}{kept}")
    if path.stat().st_size > MAX_BYTES:
        raise CorruptModel(f"{path.name} is larger than {MAX_BYTES} bytes")
    try:
        with safe_open(path, framework="numpy") as opened:
            described = [(key, opened.get_slice(key)) for key in opened.keys()]  # noqa: SIM118
            kinds = {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in described}
    except SafetensorError as error:
        raise CorruptModel(f"{path} is damaged: {error}") from None
    mapped, tensors = SafetensorsBytes(path), dict[str, Float32Array]()
    for key, (kind, shape) in kinds.items():
        if kind not in BYTES:
            raise InputError(f"{key} in {path} is stored as {kind}; an adapter has {', '.join(BYTES)}")
        if 0 in shape or not shape:
            raise CorruptModel(f"{key} in {path} has the shape {list(shape)}")
        tensors[key] = widen(kind, mapped.rows(key, kind, shape), shape)
    return tensors


def _split_name(name: str, stored_name: str) -> tuple[str, str]:
    """(module, "lora_A.weight", "lora_B.weight" or "lora_B.bias") of a stored tensor."""
    path = stored_name
    for prefix in _PREFIXES:
        if path.startswith(prefix):
            path = path.removeprefix(prefix)
            break
    found = re.fullmatch(r"(.+)\.(lora_[AB])(?:\.default)?\.(weight|bias)", path)
    if found is None or (found[2], found[3]) == ("lora_A", "bias"):
        raise InputError(f"the adapter {name!r} has the tensor {stored_name}, which plait does not support")
    return found[1].replace("language_model.", "", 1), f"{found[2]}.{found[3]}"


def _update(name: str, module: str, parts: Mapping[str, Float32Array], fields: Mapping[str, Any]) -> LowRankUpdate:
    missing = {"lora_A.weight", "lora_B.weight"} - parts.keys()
    if missing:
        raise CorruptModel(f"the adapter {name!r} has no {missing.pop()} of {module}")
    down, up, bias = parts["lora_A.weight"], parts["lora_B.weight"], parts.get("lora_B.bias")
    if down.ndim != 2 or up.ndim != 2 or (bias is not None and bias.shape != (len(up),)):
        raise CorruptModel(f"the adapter {name!r} has tensors of {module} that are no matrices")
    rank = _of_pattern(fields.get("rank_pattern"), module, fields["r"])
    alpha = _of_pattern(fields.get("alpha_pattern"), module, fields["lora_alpha"])
    if rank != len(down):
        raise CorruptModel(f"the adapter {name!r} has rank {len(down)} at {module}, its {CONFIG} says {rank}")
    scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    return LowRankUpdate(down, up * up.dtype.type(scale), None if bias is None else bias * bias.dtype.type(scale))


def _of_pattern(patterns: object, module: str, default: float) -> float:
    """The value of the first key that is the end of a module's name, or a regular expression for it."""
    for key, value in (patterns if isinstance(patterns, Mapping) else {}).items():
        try:
            is_match = re.match(rf"(.*\.)?({key})$", module) is not None
        except re.error:
            raise CorruptModel(f"{key!r:.60} in {CONFIG} is no regular expression") from None
        if is_match and isinstance(value, int | float):
            return value
    return default
