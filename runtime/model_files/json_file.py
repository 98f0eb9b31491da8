"""Reads JSON files of model folders, with a size limit and plait's errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.runtime.errors import CorruptModel, ModelNotFound

MAX_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ModelNotFound if the file is missing, CorruptModel if it holds no object.

    >>> read_json_object(Path("model/config.json"))["vocab_size"]  # doctest: +SKIP
    49152
    """
    value: dict[str, Any] = _read_json(path, dict, "object")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The JSON list in the file. Raises ModelNotFound if the file is missing, CorruptModel if it holds no list."""
    value: list[Any] = _read_json(path, list, "list")
    return value


def _read_json(path: Path, kind: type, name: str) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CorruptModel(f"{path.name} is larger than {MAX_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path.parent} has no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON: it is truncated or damaged; download it again") from error
    if not isinstance(value, kind):
        raise CorruptModel(f"{path} does not hold a JSON {name}")
    return value
