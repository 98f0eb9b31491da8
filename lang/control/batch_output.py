"""The output of `plait batch`: a line of JSON for each item, written when the item has ended."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from plait.lang.core.state import ProgramState
from plait.lang.tools.tool import ToolCall
from plait.runtime.errors import InputError

TABLE_SUFFIX = ".parquet"
ROW_FIELDS = frozenset({"index", "input", "output", "return", "error", "usage"})
ROW_START = b'{"index": '
USAGE_FIELDS = ("prompt_tokens", "cached_tokens", "completion_tokens")


class OutputFile:
    """The lines of the output. `done`: index -> line without an error, of this run or an earlier one."""

    def __init__(self, path: Path, items: Mapping[int, Any], *, is_read: bool = True) -> None:
        """`is_read`: whether the lines of an earlier run are read, and those without an error kept."""
        self._path, self._items, self._lock = path, items, threading.Lock()
        self.done: dict[int, dict[str, Any]] = {}
        self.write_error: OSError | None = None
        self.abort_items: Callable[[], object] = lambda: None  # called when a line cannot be written
        self._failed: dict[int, dict[str, Any]] = {}
        if is_read:
            self._read(path)

    def _read(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise InputError(f"the output {path} is not a file")
        try:
            *lines, tail = path.read_bytes().split(b"\n") if path.exists() else [b""]
            for number, line in enumerate(lines, 1):
                self._keep(number, line)
            if tail and not (_is_cut_off(tail) and ROW_START[: len(tail)] == tail[: len(ROW_START)]):
                self._keep(len(lines) + 1, tail)
            self._replace([*self.done.values()])  # without lines of errors, and an incomplete one that a kill left
        except OSError as error:
            raise InputError(f"the output cannot be written: {error}") from None

    def _keep(self, number: int, line: bytes) -> None:
        """Takes a line of an earlier run. Raises InputError for any other line, before anything is written."""
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        index = row.get("index", -1) if isinstance(row, dict) and row.keys() >= ROW_FIELDS else -1
        if index not in self._items or row["input"] != self._items[index]:
            text = f"{self._path}, line {number}, is not a result of this input"
            raise InputError(f"{text}; remove the file or name another")
        if row.get("error") is None:
            self.done[index] = row

    def record(self, index: int, state: ProgramState) -> None:
        """Adds the line of an item that has ended."""
        self.add(index, **result_of(state))

    def add(
        self,
        index: int,
        output: dict[str, Any] | None = None,
        value: Any = None,
        error: str | None = None,
        usage: dict[str, int] | None = None,
    ) -> None:
        """Appends a line."""
        item = self._items[index]
        row = {"index": index, "input": item, "output": output, "return": value, "error": error, "usage": usage}
        with self._lock:
            try:
                with self._path.open("ab") as file:
                    file.write(_encoded(row))
            except OSError as write_error:
                self.write_error = self.write_error or write_error
                self.abort_items()
                raise
            (self.done if error is None else self._failed)[index] = row

    def check_written(self) -> None:
        """Raises InputError if a line could not be written."""
        if self.write_error is not None:
            text = f"the output cannot be written: {self.write_error}"
            raise InputError(f"{text}; the same command continues") from None

    def finish(self) -> tuple[int, int]:
        """Puts the lines in the order of the input. Returns the numbers of lines and of those with an error."""
        rows = self.done | self._failed
        self._replace([rows[index] for index in sorted(rows)])
        return len(rows), len(self._failed)

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        part = self._path.with_name(self._path.name + ".part")
        with part.open("wb") as file:
            file.writelines(map(_encoded, rows))
        os.replace(part, self._path)


def result_of(state: ProgramState) -> dict[str, Any]:
    """Returns what a line says of an item that has ended: the arguments of `OutputFile.add`."""
    error = state.error()
    if error is not None:
        return {"error": str(error)}
    usage = {name: getattr(state.usage, name) for name in USAGE_FIELDS}
    variables = {name: as_json(state[name]) for name in list(state._branch.variables)}
    return {"output": variables, "value": as_json(state.ret_value), "usage": usage}


def _is_cut_off(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _encoded(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def as_json(value: Any) -> Any:
    """Returns a value of a program as JSON data: models and data classes as objects, what has no such form as text."""
    if isinstance(value, enum.Enum):
        return as_json(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, ToolCall):
        return {"name": value.name, "arguments": as_json(value.arguments)}
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return [as_json(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct) or hasattr(value, "_asdict"):
        return as_json(_fields(value))
    return str(value)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if hasattr(value, "_asdict"):
        fields: dict[str, Any] = value._asdict()
        return fields
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
