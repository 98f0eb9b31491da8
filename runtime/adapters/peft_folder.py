"""Reads adapters as the package peft saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from safetensors import SafetensorError, safe_open

from plait.runtime.adapters.adapter import EMBEDDING, HEAD, LowRankUpdate, ReadUpdates, check_shapes, modules_of
from plait.runtime.arrays import Float32Array
from plait.runtime.errors import CorruptModel, InputError, ModelNotFound
from plait.runtime.model_files.json_file import read_json_object
from plait.runtime.model_files.safetensors_bytes import BYTES, LENGTH_BYTES, SafetensorsBytes, widen
from plait.runtime.models.checkpoint_interface import WeightShapes
from plait.runtime.models.config import ModelConfig
from plait.runtime.models.registry import FAMILIES_BY_NAME

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PARTS = ("lora_A.weight", "lora_B.weight", "lora_B.bias")
MAX_BYTES = 1 << 34
MAX_HEADER_BYTES = 100_000_000  # as in the package safetensors
MAX_LAYOUTS = 64
RUN_BYTES = 1 << 20
MAX_PATTERN_CHARS, MAX_BRANCHES = 200, 4
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
    *("layers_to_transform", "layers_pattern", "bias", "lora_bias"),
}
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
# Initial values with which peft changes the model's own weights, unless the adapter was converted when it was saved.
_CHANGING_THE_BASE = re.compile("pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)


class _Header(NamedTuple):
    """A tensor of the file: its name, type and shape, where its bytes begin, and their number."""

    key: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


class _Layout(NamedTuple):
    """What the headers of an adapter say: its tensors in runs of neighbours of one type, and by module their names by
    their part, and its scale."""

    runs: Sequence[Sequence[_Header]]
    parts: Mapping[str, Mapping[str, str]]
    scales: Mapping[str, float]


# Those checked so far, by `_layout_key`: adapters of one training script differ in their numbers alone.
_layouts: dict[bytes, _Layout] = {}


def open_peft_folder(name: str, folder: Path, config: ModelConfig, shapes: WeightShapes) -> ReadUpdates:
    """Checks the adapter in a folder, for a model of this config and these weights (`expected_shapes`), but for its
    numbers, which the returned function reads.

    Raises ModelNotFound if a file is missing, CorruptModel if one is damaged, and InputError for an adapter of another
    kind or model, which names the field or tensor.
    """
    fields = read_json_object(folder / CONFIG)
    _check_fields(name, fields)
    key = _layout_key(fields, folder / WEIGHTS, config)
    layout = _layouts.get(key) or _checked_layout(name, folder, fields, config, shapes)
    if key not in _layouts and len(_layouts) >= MAX_LAYOUTS:
        _layouts.clear()
    _layouts[key] = layout

    def read() -> dict[str, LowRankUpdate]:
        tensors = {key: tensor for run in layout.runs for key, tensor in _read_run(folder / WEIGHTS, run)}
        return {
            module: _update({part: tensors[key] for part, key in of_module.items()}, layout.scales[module])
            for module, of_module in layout.parts.items()
        }

    return read


def _layout_key(fields: Mapping[str, Any], path: Path, config: ModelConfig) -> bytes:
    """A digest of all that `_checked_layout` reads. Equal headers of files of one size are both valid or both not.

    Raises ModelNotFound if there is no file.
    """
    if not path.is_file():
        others = [other.name for other in path.parent.glob("adapter_model.*")]
        kept = f" (plait does not read {others[0]}, which can run code)" if others else ""
        raise ModelNotFound(f"{path.parent} has no {path.name}{kept}")
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        header = file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
    said = {field: fields.get(field) for field in sorted(_READ)}
    digest = hashlib.blake2b(f"{config} {path.stat().st_size} {json.dumps(said)}\n".encode())
    digest.update(start + header)
    return digest.digest()


def _checked_layout(
    name: str, folder: Path, fields: Mapping[str, Any], config: ModelConfig, shapes: WeightShapes
) -> _Layout:
    """The headers of an adapter, checked as `open_peft_folder` describes."""
    patterns = {field: _patterns(name, field, fields.get(field)) for field in ("rank_pattern", "alpha_pattern")}
    headers = _without_base_weights(name, _read_headers(folder / WEIGHTS), shapes)
    modules = frozenset(modules_of(config, FAMILIES_BY_NAME[config.architecture]))
    parts, scales = dict[str, dict[str, str]](), dict[str, float]()
    for stored_name in headers:
        path, part = _split_name(name, stored_name)
        module = _module_of(path)
        if module not in modules:
            raise InputError(f"the adapter {name!r} changes {module}, which plait cannot adapt in this model")
        of_module = parts.setdefault(module, {})
        if part in of_module:
            raise CorruptModel(f"the adapter {name!r} has {part} of {module} twice: {of_module[part]}, {stored_name}")
        of_module[part] = stored_name
        rank = _of_pattern(patterns["rank_pattern"], path, fields["r"])
        alpha = _of_pattern(patterns["alpha_pattern"], path, fields["lora_alpha"])
        if part == "lora_A.weight" and rank != headers[stored_name].shape[0]:
            found = headers[stored_name].shape[0]
            raise CorruptModel(f"the adapter {name!r} has rank {found} at {module}, its {CONFIG} says {rank:g}")
        scales[module] = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank) if rank > 0 else 0.0
    for module, of_module in parts.items():
        if missing := {"lora_A.weight", "lora_B.weight"} - of_module.keys():
            raise CorruptModel(f"the adapter {name!r} has no {missing.pop()} of {module}")
        down, up, bias = (headers[of_module[part]].shape if part in of_module else None for part in _PARTS)
        assert down is not None and up is not None
        check_shapes(name, module, down, up, shapes, bias)
    return _Layout(_runs(headers.values()), parts, scales)


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
        if not _is_number(fields.get(field)):
            raise CorruptModel(f"{CONFIG} of the adapter {name!r} does not say {field!r}")
    if fields.get("use_rslora") not in (None, False, True):
        raise CorruptModel(f"{CONFIG} of the adapter {name!r} has use_rslora={fields['use_rslora']!r:.60}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def _read_headers(path: Path) -> dict[str, _Header]:
    """All tensors of a file, without their numbers."""
    if path.stat().st_size > MAX_BYTES:
        raise CorruptModel(f"{path.name} is larger than {MAX_BYTES} bytes")
    try:
        with safe_open(path, framework="numpy") as opened:
            described, mapped = [(key, opened.get_slice(key)) for key in opened.keys()], SafetensorsBytes(path)  # noqa: SIM118
            headers = [
                _Header(key, part.get_dtype(), tuple(part.get_shape()), *mapped.extent(key)) for key, part in described
            ]
    except SafetensorError as error:
        raise CorruptModel(f"{path} is damaged: {error}") from None
    for key, kind, shape, *_ in headers:
        if kind not in BYTES:
            raise InputError(f"{key} in {path} is stored as {kind}; an adapter has {', '.join(BYTES)}")
        if 0 in shape or not shape:
            raise CorruptModel(f"{key} in {path} has the shape {list(shape)}")
    return {header.key: header for header in headers}


def _without_base_weights(name: str, headers: dict[str, _Header], shapes: WeightShapes) -> dict[str, _Header]:
    """The tensors without the model's own embedding and head, which peft saves beside an update of one of them.

    Raises InputError for other shapes.
    """
    ends = {stored_name: _module_of(_without_prefix(stored_name)) for stored_name in headers}
    is_adapted = any(end.startswith((f"{EMBEDDING}.lora_", f"{HEAD}.lora_")) for end in ends.values())
    if not is_adapted:
        return headers
    whole = {f"{module}{kind}.weight" for module in (EMBEDDING, HEAD) for kind in ("", ".base_layer")}
    for stored_name in [stored_name for stored_name, end in ends.items() if end in whole]:
        shape, expected = headers.pop(stored_name).shape, shapes[f"{EMBEDDING}.weight"]
        if shape != expected:
            raise InputError(
                f"the adapter {name!r} is for another model: its {stored_name} is {list(shape)}, the model's "
                f"{list(expected)}"
            )
    return headers


def _runs(headers: Iterable[_Header]) -> list[list[_Header]]:
    """Tensors in the order in which they are stored, in runs without gaps of one type, which fit a core's cache."""
    runs: list[list[_Header]] = []
    for header in sorted(headers, key=lambda header: header.begin):
        is_next = runs and (runs[-1][-1].kind, runs[-1][-1].end) == (header.kind, header.begin)
        if is_next and header.end - runs[-1][0].begin <= RUN_BYTES:
            runs[-1].append(header)
        else:
            runs.append([header])
    return runs


def _read_run(path: Path, run: Sequence[_Header]) -> Iterator[tuple[str, Float32Array]]:
    """The names and numbers of tensors, read and widened in few calls, during which other threads run.

    They are read and not mapped: a file that becomes shorter meanwhile is an error, and no signal.
    """
    begin, num_bytes = run[0].begin, run[-1].end - run[0].begin
    stored = np.fromfile(path, np.uint8, num_bytes, offset=begin)
    if len(stored) != num_bytes:
        raise CorruptModel(f"{path.name} is truncated or damaged; download it again")
    size = BYTES[run[0].kind]
    numbers = widen(run[0].kind, stored, (num_bytes // size,))
    for header in run:
        yield header.key, numbers[(header.begin - begin) // size : (header.end - begin) // size].reshape(header.shape)


def _split_name(name: str, stored_name: str) -> tuple[str, str]:
    """(path of the module, one of `_PARTS`) of a stored tensor."""
    path = _without_prefix(stored_name)
    if embedding := re.fullmatch(r"(.+)\.lora_embedding_([AB])(?:\.default)?", path):
        return embedding[1], f"lora_{embedding[2]}.weight"
    found = re.fullmatch(r"(.+)\.(lora_[AB])(?:\.default)?\.(weight|bias)", path)
    if found is None or (found[2], found[3]) == ("lora_A", "bias"):
        raise InputError(f"the adapter {name!r} has the tensor {stored_name}, which plait does not support")
    return found[1], f"{found[2]}.{found[3]}"


def _without_prefix(stored_name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if stored_name.startswith(prefix)), "")
    return stored_name.removeprefix(prefix)


def _module_of(path: str) -> str:
    """The name in a text model of a module, or of a part of one."""
    return path.replace("language_model.", "", 1)


def _update(parts: Mapping[str, Float32Array], scale: float) -> LowRankUpdate:
    down, up, bias = (parts.get(part) for part in _PARTS)
    assert down is not None and up is not None
    for part in (up, bias):
        if part is not None:
            part *= np.float32(scale)
    return LowRankUpdate(down, up, bias)


def _patterns(name: str, field: str, value: object) -> list[tuple[re.Pattern[str], float]]:
    """What a field says of the modules that match: each key is the end of a module's path, or a pattern for it."""
    if not isinstance(value or {}, dict):
        raise CorruptModel(f"{CONFIG} of the adapter {name!r} has {field}={value!r:.60}")
    patterns: list[tuple[re.Pattern[str], float]] = []
    for key, number in (value or {}).items():  # type: ignore[attr-defined]
        if not _is_number(number):
            raise CorruptModel(f"{CONFIG} of the adapter {name!r} has {number!r:.60} at {key!r:.60} in {field}")
        if not _is_quick(key):
            raise InputError(f"the adapter {name!r} has a pattern in {field} that may take too long: {key!r:.60}")
        try:
            patterns.append((re.compile(rf"(.*\.)?({key})$"), number))
        except (re.error, OverflowError):
            raise CorruptModel(f"{key!r:.60} in {CONFIG} is no regular expression") from None
    return patterns


def _is_quick(pattern: str) -> bool:
    """Whether a pattern is short, repeats no group, and has at most MAX_BRANCHES groups and repetitions."""
    text = re.sub(r"\\.", "_", pattern)  # an escaped character is none of them
    branches = re.findall(r"(?<!\()[*+?{]|\(", text)
    return len(pattern) <= MAX_PATTERN_CHARS and len(branches) <= MAX_BRANCHES and not re.search(r"\)[*+{]", text)


def _of_pattern(patterns: Sequence[tuple[re.Pattern[str], float]], path: str, default: float) -> float:
    """The value of the first pattern that matches the path of a module."""
    return next((value for pattern, value in patterns if pattern.match(path)), default)
