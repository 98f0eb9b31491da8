"""The output of `plait batch`: a line of JSON for each item, written when the item has ended."""

from __future__ import annotations

import enum
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.lang.batches.item_log import model_name
from plait.lang.batches.saved_values import fields_of, is_data_class
from plait.lang.states.state import ProgramState
from plait.lang.tools.tool import ToolCall
from plait.runtime.errors import InputError
from plait.runtime.results.json_lines import encode_json_line
from plait.runtime.results.result_file import NotAResult, ResultFile, read_written, replacing

if TYPE_CHECKING:
    from plait.lang.execution.execution import Execution
    from plait.runtime.programs.backend import BackendClient

TABLE_SUFFIX = ".parquet"
ROW_FIELDS = frozenset({"index", "input", "output", "return", "error", "usage"})
ROW_START = b'{"index": '
SIDECAR_SUFFIX, SIDECAR_NAME, SIDECAR_VERSION = ".plait", "plait batch", 1
USAGE_FIELDS = ("prompt_tokens", "cached_tokens", "completion_tokens")


class OutputFile:
    """The `ItemLog` of `plait batch`: the lines of its output. Raises InputError for a file that is not such an output.

    items: index -> arguments, or what stands in their place. identity: what all lines are results of, see
    `batch_identity`; with the model it is kept in OUT.plait, beside the output. A file without one is continued as it
    is, so removing that file keeps the lines whatever has changed.
    done: index -> line without an error, of this run or an earlier one. refused: index -> error of an item that does
    not run.
    """

    def __init__(self, path: Path, items: Mapping[int, Any], identity: Mapping[str, str]) -> None:
        self._path, self._items, self._identity = path, items, dict(identity)
        self._lock = threading.Lock()
        self.done: dict[int, dict[str, Any]] = {}
        self.refused: dict[int, str] = {}
        self.write_error: OSError | None = None
        self.running: Sequence[Execution] = ()  # aborted when a line cannot be written
        self._failed: dict[int, dict[str, Any]] = {}
        self._order: list[int] = []  # of the lines in the file
        self._open()

    def _open(self) -> None:
        if self._path.exists() and not self._path.is_file():
            raise InputError(f"the output {self._path} is not a file")
        try:
            self._file = ResultFile(self._path, self._take, ROW_START)
        except NotAResult as error:
            raise InputError(f"{error}; remove the file or name another") from None
        except OSError as error:
            raise InputError(f"the output cannot be written: {error}") from None
        self._saved_identity = _read_identity(self._sidecar)
        self.check_identity(self._saved_identity)
        try:
            self._file.begin()  # reports an unwritable path before a model is started
        except OSError as error:
            raise InputError(f"the output cannot be written: {error}") from None

    @property
    def _sidecar(self) -> Path:
        return self._path.with_name(self._path.name + SIDECAR_SUFFIX)

    def check_identity(self, saved: Mapping[str, Any]) -> None:
        """Raises InputError if there are results of another program, model or other sampling keywords."""
        for name, value in self._identity.items():
            if self.done and saved.get(name, value) != value:
                text = f"{self._path} has results of before a change of the {name}; remove it or name another output"
                raise InputError(f"{text} (to keep them, remove {self._sidecar.name})")

    def _take(self, text: bytes) -> None:
        """Takes a line of an earlier run."""
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        index = row.get("index", -1) if isinstance(row, dict) and row.keys() >= ROW_FIELDS else -1
        if index not in self._items or row["input"] != self._items[index]:
            raise ValueError("is not a result of this input")
        self._order.append(index)
        if row["error"] is None:
            self.done[index] = row

    def begin(self, client: BackendClient | None) -> Mapping[int, ProgramState]:
        """Writes the lines of the refused items. `client`: None if no item runs."""
        if client is not None:
            self._identity["model"] = model_name(client)
            self.check_identity(self._saved_identity)
            self._write_identity()
        for index, reason in self.refused.items():
            self.add(index, failed_result(reason))
        self.check_written()
        return {}

    def _write_identity(self) -> None:
        if self._saved_identity == self._identity:
            return
        try:
            with replacing(self._sidecar) as file:
                file.write(encode_json_line({SIDECAR_NAME: SIDECAR_VERSION, **self._identity}))
        except OSError as error:
            raise InputError(f"the output cannot be written: {error}") from None

    def record(self, index: int, state: ProgramState) -> None:
        """Adds the line of an item that has ended."""
        self.add(index, result_of(state))

    def add(self, index: int, result: Mapping[str, Any]) -> None:
        """Appends a line. If that fails, aborts the items that run; `check_written` then raises."""
        row = {"index": index, "input": self._items[index], **result}
        with self._lock:
            try:
                self._file.append(encode_json_line(row))
            except OSError as write_error:
                self.write_error = self.write_error or write_error
                for execution in self.running:
                    execution.abort()
                return
            self._order.append(index)
            (self.done if row["error"] is None else self._failed)[index] = row

    def check_written(self) -> None:
        """Raises InputError if a line could not be written."""
        if self.write_error is not None:
            text = f"the output cannot be written: {self.write_error}"
            raise InputError(f"{text}; the same command continues") from None

    def finish(self) -> tuple[int, int]:
        """Puts the lines in the order of the input. Returns the numbers of lines and of those with an error."""
        rows = self.done | self._failed
        if self._order != sorted(rows):  # also if a line replaces that of an earlier run
            try:
                self._file.rewrite(encode_json_line(rows[index]) for index in sorted(rows))
            except OSError as error:
                raise InputError(f"the output cannot be written: {error}; the same command continues") from None
        return len(rows), len(self._failed)


def _read_identity(path: Path) -> dict[str, Any]:
    """Returns what an output is a result of. Raises InputError for a file that says something else."""
    try:
        saved = json.loads(read_written(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or saved.pop(SIDECAR_NAME, None) != SIDECAR_VERSION:
        raise InputError(f"{path} is not a file that plait batch wrote; name another output")
    return saved


def result_of(state: ProgramState) -> dict[str, Any]:
    """Returns what a line says of an item that has ended, beside its index and input."""
    error = state.error()
    if error is not None:
        return failed_result(str(error))
    usage = {name: getattr(state.usage, name) for name in USAGE_FIELDS}
    variables = {name: as_json(state[name]) for name in list(state._branch.variables)}
    return {"output": variables, "return": as_json(state.ret_value), "error": None, "usage": usage}


def failed_result(error: str) -> dict[str, Any]:
    """Returns what a line says of an item with an error."""
    return {"output": None, "return": None, "error": error, "usage": None}


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
        return as_json(value.model_dump(mode="json"))  # which leaves NaN as it is
    return as_json(fields_of(value)) if is_data_class(type(value)) else str(value)
