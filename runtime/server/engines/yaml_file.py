"""Reads a YAML file of settings as nodes with their lines. Values stay texts: `no` and `1:30` mean what they say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from plait.runtime.errors import InputError, ModelError

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
