"""Reads a models file: a YAML mapping of names to models and their settings.

    small: ~/models/small.gguf            # a name and what `plait serve MODEL` takes
    chat:
      model: Qwen/Qwen3-0.6B
      context-length: 4096                # options of `plait serve`, without their dashes
      adapters:
        sql: adapters/sql                 # a name and what `plait serve --lora` takes
    claude-sonnet:
      alias: small                        # another name of a model in this file

YAML's values are read as text and converted by `MODEL_OPTIONS`, so that `no` or `1:30` mean what they say.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from plait.runtime.config import MTP, engine_config
from plait.runtime.errors import InputError, ModelError
from plait.runtime.model_files.locate import locate_model
from plait.runtime.process.draft_files import draft_files
from plait.runtime.server.engines.model_names import Alias, check_name, resolve_aliases
from plait.runtime.server.engines.model_options import MODEL_OPTIONS, named_option
from plait.runtime.server.engines.model_spec import ModelSpec
from plait.runtime.server.engines.start import checked_devices, num_ranks
from plait.runtime.similar_names import did_you_mean

MAX_MODELS = 256
MODEL_KEY, ALIAS_KEY, ADAPTERS_KEY = "model", "alias", "adapters"


def read_models(
    path: Path, defaults: Mapping[str, Any] | None = None, aliases: Sequence[Alias] = ()
) -> list[ModelSpec]:
    """Returns the models of a file, in its order.

    defaults: settings of models that have none of their own. aliases: names beside those of the file.
    Raises InputError with the file's line for what is wrong, also for a model that is not found.
    """
    root = read_root(path, "models file")
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise InputError(f"{path} must be a mapping of names to models, such as 'small: small.gguf'")
    if len(root.value) > MAX_MODELS:
        raise InputError(f"{path} has {len(root.value)} models; {MAX_MODELS} are allowed")
    specs, own_aliases = [], []
    for name, line, value in entries(path, root):
        if (alias := _alias(path, name, line, value)) is not None:
            own_aliases.append(alias)
        else:
            specs.append(_model(path, name, line, value, defaults or {}))
    if not specs:
        raise InputError(f"{path} has aliases only, and no model")
    names = resolve_aliases([*own_aliases, *aliases], [spec.name for spec in specs])
    _check_adapter_names(specs, names)
    return [replace(spec, aliases=names[spec.name]) for spec in specs]


def _check_adapter_names(specs: Sequence[ModelSpec], aliases: Mapping[str, Sequence[str]]) -> None:
    """Raises InputError for the name of an adapter that something else has."""
    taken = {*aliases, *(alias for names in aliases.values() for alias in names)}
    for spec in specs:
        for name in spec.settings.get(ADAPTERS_KEY) or ():
            if name in taken:
                raise InputError(f"{spec.where}: the adapter's name {name!r} is taken")
            taken.add(name)


def _alias(path: Path, name: str, line: int, value: yaml.Node) -> Alias | None:
    """The alias that an entry is; None for a model."""
    if not isinstance(value, yaml.MappingNode):
        return None
    keys = {key: (key_line, node) for key, key_line, node in entries(path, value)}
    if ALIAS_KEY not in keys:
        return None
    alias_line, node = keys[ALIAS_KEY]
    where = f"{path}, line {alias_line}"
    if len(keys) > 1:
        raise InputError(f"{where}: an alias has no settings of its own: its engine is that of its model")
    return Alias(name, text_of(where, ALIAS_KEY, node), f"{path}, line {line}")


def _model(path: Path, name: str, line: int, value: yaml.Node, defaults: Mapping[str, Any]) -> ModelSpec:
    where = f"{path}, line {line}"
    check_name(where, name)
    lines = {MODEL_KEY: line}
    texts: dict[str, str] = {}
    adapters: dict[str, str] = {}
    if isinstance(value, yaml.MappingNode):
        for key, key_line, node in entries(path, value):
            lines[key] = key_line
            if key == ADAPTERS_KEY:
                adapters = _adapters(path, key_line, node)
            else:
                texts[key] = text_of(f"{path}, line {key_line}", key, node)
    elif not is_null(value):
        texts[MODEL_KEY] = text_of(where, name, value)
    settings = dict(defaults) | ({ADAPTERS_KEY: adapters} if adapters else {})
    for key, text in texts.items():
        if key != MODEL_KEY:
            with at(f"{path}, line {lines[key]}"):
                settings |= _setting(path, key, text)
    model = texts.get(MODEL_KEY)
    with at(f"{path}, line {lines[MODEL_KEY]}"):
        model = None if model is None else resolved(path, model)
        located = locate_model(model)
    _check_settings(path, lines, line, settings)
    return ModelSpec(name, model, located, settings, where)


def _adapters(path: Path, line: int, value: yaml.Node) -> dict[str, str]:
    """The names of a model's adapters, and their folders or files."""
    if not isinstance(value, yaml.MappingNode):
        raise InputError(
            f"{path}, line {line}: 'adapters' is a mapping of names to folders or files, such as 'sql: adapters/sql'"
        )
    paths = {}
    for name, name_line, node in entries(path, value):
        where = f"{path}, line {name_line}"
        check_name(where, name)
        paths[name] = resolved(path, text_of(where, name, node))
        if not os.path.exists(paths[name]):
            raise InputError(f"{where}: the adapter {name!r}: there is no {paths[name]:.200}")
    return paths


def _setting(path: Path, key: str, text: str) -> dict[str, Any]:
    option = MODEL_OPTIONS.get(key)
    if option is None:
        known = [MODEL_KEY, ALIAS_KEY, *MODEL_OPTIONS, ADAPTERS_KEY]
        hint = did_you_mean(key.replace("_", "-"), known)
        raise InputError(f"unknown setting {key!r:.100}{hint}; known are: {', '.join(known)}")
    value = option.parse(text)
    if option.metavar == "FILE":
        value = resolved(path, value)
    if option.metavar == "MODEL" and value != MTP:
        value = resolved(path, value)
        draft_files(value)
    return {option.setting: value}


def _check_settings(path: Path, lines: Mapping[str, int], line: int, settings: Mapping[str, Any]) -> None:
    """Raises InputError for what the runtime would refuse, with the line of the setting."""
    engine = {name: value for name, value in settings.items() if name not in ("replicas", "device")}
    try:
        devices = checked_devices(settings.get("replicas"), settings.get("device"), num_ranks(engine))
        for device in devices:
            engine_config(device=device, **engine)
    except InputError as error:
        option, text = named_option(error)
        at = line if option is None else lines.get(option.name, line)
        raise InputError(f"{path}, line {at}: {text}") from None


# -- yaml file ------------------------------------------------------------------------------------
# Reads a YAML file of settings as nodes with their lines. Values stay texts: `no` and `1:30` mean what they say.

MAX_FILE_BYTES = 1 << 20


def read_root(path: Path, kind: str) -> yaml.Node | None:
    """Returns the file's root; None for an empty one. kind: what the file is, for errors. Raises InputError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return yaml.compose(data.decode("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the {kind} {path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InputError(f"{path}, line {line}: this is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {error}") from None


def entries(path: Path, mapping: yaml.MappingNode) -> Iterator[tuple[str, int, yaml.Node]]:
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


def is_null(node: yaml.Node) -> bool:
    """Whether a value is missing, or null."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def text_of(where: str, key: str, node: yaml.Node) -> str:
    """Returns a value as a text. Raises InputError for a list, a mapping and a missing value."""
    if not isinstance(node, yaml.ScalarNode) or is_null(node):
        raise InputError(f"{where}: {key!r:.100} must have one value")
    return str(node.value)


def resolved(path: Path, text: str) -> str:
    """Returns a path that is relative to the file's folder as one that is not; other names as they are."""
    expanded = os.path.expanduser(text)
    beside = path.parent / expanded
    return str(beside) if "\0" not in text and len(text) < 1024 and beside.exists() else expanded


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Adds `where` to the errors of a block."""
    try:
        yield
    except (InputError, ModelError) as error:
        raise InputError(f"{where}: {error}") from None
