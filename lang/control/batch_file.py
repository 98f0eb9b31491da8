"""`plait batch`: runs a program once for each line of a JSON Lines file, and writes a line for each result.

    {"index": 0, "input": {...}, "output": {"answer": ...}, "return": null, "error": null, "usage": {...}}

A line is appended when its item ends. At the end the lines are in the order of the input. A second run keeps the lines
without an error and runs the other items, with the seeds that they would have had.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from plait.lang.backends.default_backend import Backend
from plait.lang.batch import num_workers
from plait.lang.core.execution import Execution
from plait.lang.core.state import ProgramState
from plait.lang.program import Program
from plait.lang.tools.tool import ToolCall
from plait.runtime.errors import InputError

CHUNK_ITEMS = 2000  # states that are in memory at a time
USAGE_FIELDS = ("prompt_tokens", "cached_tokens", "completion_tokens")
MAX_SHOWN_INPUT = 1000  # characters of a line that is not an object


def run_batch_file(
    program: Program[Any],
    input_path: Path,
    output_path: Path,
    *,
    backend: Backend | None = None,
    num_threads: int | None = None,
    progress_bar: bool = False,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Runs the program for each line of `input_path`: an object, the keyword arguments. Returns the numbers of lines
    and of those with an error.

    A line that is no object, or whose arguments do not fit the program, gets an error in its place. Raises InputError
    if a file cannot be read or written, or if `output_path` has the results of other input.
    """
    items = _read_items(input_path)
    output = OutputFile(output_path, items)
    ready = {}
    for index, item in items.items():
        if index in output.done:
            continue
        try:
            if not isinstance(item, dict):
                raise InputError(f"line {index + 1} of {input_path.name} is not a JSON object")
            program._arguments.check(f"program {program.name!r}, line {index + 1}", (), item)
            ready[index] = program._arguments.with_bound((), item)
        except InputError as error:
            output.add(index, error=str(error))
    options, _ = program._arguments.split_sampling("batch", dict(sampling or {}))
    client = program._client("batch", backend, options) if ready else None
    executions = []
    for index, arguments in ready.items():
        assert client is not None
        executions.append(Execution(program.name, program._body, (), arguments, client, options, None, index))
        executions[-1].on_done = partial(output.record, index)
    for first in range(0, len(executions), CHUNK_ITEMS):
        chunk = executions[first : first + CHUNK_ITEMS]
        output.abort_items = partial(_abort, chunk)
        _run(program, chunk, num_threads, progress_bar)
        if output.write_error is not None:
            text = f"the output cannot be written: {output.write_error}"
            raise InputError(f"{text}; the same command continues") from None
    return output.finish()


def _run(program: Program[Any], executions: list[Execution], num_threads: int | None, progress_bar: bool) -> None:
    threads: int | Literal["auto"] = "auto" if num_threads is None else num_threads
    program._run_all(executions, threads, num_workers(threads, len(executions)), progress_bar)


def _abort(executions: list[Execution]) -> None:
    for execution in executions:
        execution.abort()


def _read_items(path: Path) -> dict[int, Any]:
    """Returns the lines by number, from 0, without blank ones; a line that is not JSON as its text."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the input cannot be read: {error}") from None
    return {index: _parsed(line) for index, line in enumerate(lines) if line.strip()}


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line[:MAX_SHOWN_INPUT]


class OutputFile:
    """The lines of the output. `done`: index -> line without an error, of this run or an earlier one."""

    def __init__(self, path: Path, items: Mapping[int, Any]) -> None:
        self._path, self._items, self._lock = path, items, threading.Lock()
        self.done: dict[int, dict[str, Any]] = {}
        self.write_error: OSError | None = None
        self.abort_items: Callable[[], object] = lambda: None  # called when a line cannot be written
        self._failed: dict[int, dict[str, Any]] = {}
        try:
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if path.exists() else ():
                self._keep(number, line)
            self._replace([*self.done.values()])  # without lines of errors, and an incomplete one that a kill left
        except OSError as error:
            raise InputError(f"the output cannot be written: {error}") from None

    def _keep(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            return
        index = row.get("index", -1) if isinstance(row, dict) else -1
        if index not in self._items or row.get("input") != self._items[index]:
            text = f"{self._path}, line {number}, is not a result of this input"
            raise InputError(f"{text}; remove the file or name another")
        if row.get("error") is None:
            self.done[index] = row

    def record(self, index: int, state: ProgramState) -> None:
        """Adds the line of an item that has ended."""
        error = state.error()
        if error is not None:
            self.add(index, error=str(error))
            return
        usage = {name: getattr(state.usage, name) for name in USAGE_FIELDS}
        variables = {name: as_json(state[name]) for name in list(state._branch.variables)}
        self.add(index, output=variables, value=as_json(state.ret_value), usage=usage)

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
