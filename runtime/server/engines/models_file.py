"""Reads a models file: a YAML mapping of names to models and their settings.

    small: ~/models/small.gguf            # a name and what `plait serve MODEL` takes
    chat:
      model: Qwen/Qwen3-0.6B
      context-length: 4096                # options of `plait serve`, without their dashes

YAML's values are read as text and converted by `MODEL_OPTIONS`, so that `no` or `1:30` mean what they say.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from plait.runtime.config import engine_config
from plait.runtime.errors import InputError, ModelError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.engines.model_options import MODEL_OPTIONS
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.engines.start import checked_devices, num_ranks
from plait.runtime.similar_names import did_you_mean

MAX_FILE_BYTES = 1 << 20
MAX_MODELS = 256
DEFAULT_NAME = "default"  # of the first model, in every protocol
OLLAMA_TAG = ":latest"  # Ollama's clients add it to a name, and it is removed again
MODEL_KEY = "model"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


def read_models(path: Path, defaults: Mapping[str, Any] | None = None) -> list[ModelSpec]:
    """Returns the models of a file, in its order. defaults: settings of models that have none of their own.

    Raises InputError with the file's line for what is wrong, also for a model that is not found.
    """
    root = _root(path)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise InputError(f"{path} must be a mapping of names to models, such as 'small: small.gguf'")
    if len(root.value) > MAX_MODELS:
        raise InputError(f"{path} has {len(root.value)} models; {MAX_MODELS} are allowed")
    return [_model(path, name, line, value, defaults or {}) for name, line, value in _entries(path, root)]


def _root(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the models file {path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InputError(f"{path}, line {line}: this is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {error}") from None


def _entries(path: Path, mapping: yaml.MappingNode) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yields key, line and value. Raises InputError for a key that is no text or occurs twice."""
    lines: dict[str, int] = {}
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"{path}, line {line}: a key must be a text")
        name = key.value
        if name in lines:
            raise InputError(f"{path}, line {line}: {name!r:.100} is also in line {lines[name]}")
        lines[name] = line
        yield name, line, value


def _model(path: Path, name: str, line: int, value: yaml.Node, defaults: Mapping[str, Any]) -> ModelSpec:
    where = f"{path}, line {line}"
    if not _NAME.fullmatch(name) or name == DEFAULT_NAME or name.endswith(OLLAMA_TAG):
        raise InputError(
            f"{where}: {name!r:.100} cannot be a model's name: it has letters, digits and ._:/@+-, "
            f"is not '{DEFAULT_NAME}' and does not end with '{OLLAMA_TAG}'"
        )
    lines = {MODEL_KEY: line}
    texts: dict[str, str] = {}
    if isinstance(value, yaml.MappingNode):
        for key, key_line, node in _entries(path, value):
            lines[key], texts[key] = key_line, _text(f"{path}, line {key_line}", key, node)
    elif not _is_null(value):
        texts[MODEL_KEY] = _text(where, name, value)
    settings = dict(defaults)
    for key, text in texts.items():
        if key != MODEL_KEY:
            with _at(f"{path}, line {lines[key]}"):
                settings |= _setting(path, key, text)
    model = texts.get(MODEL_KEY)
    with _at(f"{path}, line {lines[MODEL_KEY]}"):
        model = None if model is None else _resolved(path, model)
        located = locate_model(model)
    _check_settings(path, lines, line, settings)
    return ModelSpec(name, model, located, settings, where)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _text(where: str, key: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or _is_null(node):
        raise InputError(f"{where}: {key!r:.100} must have one value")
    return str(node.value)


def _setting(path: Path, key: str, text: str) -> dict[str, Any]:
    option = MODEL_OPTIONS.get(key)
    if option is None:
        known = [MODEL_KEY, *MODEL_OPTIONS]
        hint = did_you_mean(key.replace("_", "-"), known)
        raise InputError(f"unknown setting {key!r:.100}{hint}; known are: {', '.join(known)}")
    value = option.parse(text)
    return {option.setting: _resolved(path, value) if option.metavar == "FILE" else value}


def _resolved(path: Path, text: str) -> str:
    """Returns a path that is relative to the file's folder as one that is not; other names as they are."""
    expanded = os.path.expanduser(text)
    beside = path.parent / expanded
    return str(beside) if "\0" not in text and len(text) < 1024 and beside.exists() else expanded


def _check_settings(path: Path, lines: Mapping[str, int], line: int, settings: Mapping[str, Any]) -> None:
    """Raises InputError for what the runtime would refuse, with the line of the setting."""
    engine = {name: value for name, value in settings.items() if name not in ("replicas", "device")}
    try:
        devices = checked_devices(settings.get("replicas"), settings.get("device"), num_ranks(engine))
        for device in devices:
            engine_config(device=device, **engine)
    except InputError as error:
        text = str(error)  # begins with the setting's name
        option = next((option for option in MODEL_OPTIONS.values() if re.match(rf"{option.setting}\b", text)), None)
        text = text if option is None else text.replace(option.setting, option.name, 1)
        at = line if option is None else lines.get(option.name, line)
        raise InputError(f"{path}, line {at}: {text}") from None


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Adds `where` to the errors of a block."""
    try:
        yield
    except (InputError, ModelError) as error:
        raise InputError(f"{where}: {error}") from None
