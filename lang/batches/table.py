"""Parquet files of `plait batch`: rows of the input as arguments, and the results as further columns.

Parquet files cannot grow. So the results are lines of OUT.parquet.jsonl while the batch runs, in the form of any
output, and the table is written at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.lang.batches.output import TABLE_SUFFIX, USAGE_FIELDS, OutputFile, as_json
from plait.runtime.errors import InputError
from plait.runtime.results.result_file import replacing

METADATA = b"plait batch"


def import_pyarrow(needed_by: str) -> tuple[Any, Any]:
    """Returns the modules pyarrow and pyarrow.parquet. Raises InputError, which names what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise InputError(f"{needed_by} needs the package pyarrow ({error}): pip install 'plait[parquet]'") from None
    return pyarrow, pyarrow.parquet


def read_rows(path: Path, is_argument: Callable[[str], bool]) -> dict[int, dict[str, Any]]:
    """Returns the rows by number, as JSON values: dates and numbers that JSON lacks are text.

    A binary column that is an argument raises InputError; another one is left out.
    """
    arrow, _ = import_pyarrow(path.name)
    table = _read_table(path)
    binary = [field.name for field in table.schema if _has_type(field.type, _is_binary(arrow))]
    for name in binary:
        if is_argument(name):
            raise InputError(f"{path.name}: the column {name!r} is binary, and arguments are JSON values; make it text")
    rows = table.drop_columns(binary).to_pylist() if len(binary) < table.num_columns else [{}] * table.num_rows
    return {index: as_json(row) for index, row in enumerate(rows)}


def _read_table(path: Path) -> Any:
    arrow, parquet = import_pyarrow(path.name)
    try:
        return parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"the input cannot be read: {error}") from None


class TableOutput(OutputFile):
    """The output of a batch as a Parquet file: the columns of the input, and those of `result_columns`.

    is_complete: an earlier run has finished all items without an error.
    """

    def __init__(self, path: Path, items: Mapping[int, Any], identity: Mapping[str, str], input_path: Path) -> None:
        import_pyarrow(path.name)
        self._table_path, self._input_path = path, input_path
        self._digest = hashlib.sha256(json.dumps(list(items.items())).encode()).hexdigest()
        self.is_complete = False
        super().__init__(path.with_name(path.name + ".jsonl"), items, identity)

    def _open(self) -> None:
        self.is_complete = self._table_path.exists() and not self._path.exists()
        saved = self._saved_metadata() if self._table_path.exists() else {}
        if not self.is_complete:
            super()._open()
            return
        if saved.get("failed"):
            text = f"{self._table_path} has items with an error, and {self._path.name}, from which a run continues,"
            raise InputError(f"{text} is gone; remove the file to run all items again")
        self.done = {index: {} for index in self._items}
        self.check_identity(saved)

    def _saved_metadata(self) -> dict[str, Any]:
        """Returns what the table says of itself. Raises InputError for one that is not a result of this input."""
        arrow, parquet = import_pyarrow(self._table_path.name)
        try:
            saved: dict[str, Any] = json.loads(
                (parquet.read_schema(self._table_path).metadata or {}).get(METADATA, b"{}")
            )
        except (OSError, arrow.ArrowException) as error:
            raise InputError(f"the output cannot be read: {error}; remove it or name another") from None
        if saved.get("input") != self._digest:
            raise InputError(f"{self._table_path} is not a result of this input; remove the file or name another")
        return saved

    def finish(self) -> tuple[int, int]:
        """Writes the table. The lines stay if an item failed, since the next run continues from them."""
        if self.is_complete:
            return len(self.done), 0
        num_lines, num_failed = super().finish()
        rows = self.done | self._failed
        arrow, parquet = import_pyarrow(self._table_path.name)
        indexes = sorted(rows)
        table = self._input_table(indexes)
        for name, values in result_columns([rows[index] for index in indexes], table.column_names).items():
            table = table.append_column(name, column(values))
        saved = {METADATA: json.dumps({"input": self._digest, "failed": num_failed, **self._identity}).encode()}
        try:
            with replacing(self._table_path) as file:
                parquet.write_table(table.replace_schema_metadata((table.schema.metadata or {}) | saved), file)
        except (OSError, arrow.ArrowException) as error:
            raise InputError(f"the output cannot be written: {error}; the same command continues") from None
        if not num_failed:
            self._file.remove()
            self._sidecar.unlink(missing_ok=True)
        return num_lines, num_failed

    def _input_table(self, indexes: Sequence[int]) -> Any:
        arrow, _ = import_pyarrow(self._table_path.name)
        if self._input_path.suffix == TABLE_SUFFIX:
            return _read_table(self._input_path)
        items = [item if isinstance(item := self._items[index], dict) else {} for index in indexes]
        names = list(dict.fromkeys(name for item in items for name in item))
        columns = {name: column([item.get(name) for item in items]) for name in names}
        return arrow.table(columns or {"index": indexes})


def result_columns(rows: Sequence[Mapping[str, Any]], taken: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the columns of results, lines of an output: the program's variables, return, error and token counts.

    A name that is `taken` already gets the ending "_output".

    >>> rows = [{"output": {"n": 1}, "return": None, "error": None, "usage": None}]
    >>> sorted(result_columns(rows, ["n"]))[:3]
    ['cached_tokens', 'completion_tokens', 'error']
    """
    outputs = [row["output"] or {} for row in rows]
    columns = {name: [output.get(name) for output in outputs] for name in dict.fromkeys(n for o in outputs for n in o)}
    fixed = {name: [row[name] for row in rows] for name in ("return", "error")}
    fixed |= {name: [(row["usage"] or {}).get(name) for row in rows] for name in USAGE_FIELDS}
    named: dict[str, list[Any]] = {}
    for name, values in [*((name, values) for name, values in columns.items()), *fixed.items()]:
        is_variable = values is columns.get(name)
        while name in taken or name in named or (is_variable and name in fixed):
            name += "_output"
        named[name] = values
    return named


def column(values: Sequence[Any]) -> Any:
    """Returns JSON values as an Arrow array: of their common type, or as JSON text if they have none."""
    arrow, _ = import_pyarrow("a Parquet file")
    try:
        array = arrow.array(values)
    except (arrow.ArrowException, ValueError, OverflowError):
        return arrow.array([None if value is None else as_text(value) for value in values], arrow.string())
    if arrow.types.is_null(array.type):
        return array.cast(arrow.string())
    if _has_type(array.type, lambda kind: arrow.types.is_null(kind) or (kind.num_fields == 0 and _is_struct(kind))):
        return arrow.array([None if value is None else as_text(value) for value in values], arrow.string())
    return array


def as_text(value: Any) -> str:
    """Returns text as it is, and other JSON values as JSON. Lone surrogates, which Arrow lacks, are escaped."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _is_struct(kind: Any) -> bool:
    arrow, _ = import_pyarrow("a Parquet file")
    return bool(arrow.types.is_struct(kind))


def _is_binary(arrow: Any) -> Callable[[Any], bool]:
    kinds = (arrow.types.is_binary, arrow.types.is_large_binary, arrow.types.is_fixed_size_binary)
    return lambda kind: any(is_kind(kind) for is_kind in (*kinds, arrow.types.is_binary_view))


def _has_type(kind: Any, is_kind: Callable[[Any], bool]) -> bool:
    """Whether the type, or one within it, is of a kind."""
    return is_kind(kind) or any(_has_type(kind.field(at).type, is_kind) for at in range(kind.num_fields))
