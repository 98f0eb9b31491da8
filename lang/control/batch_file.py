"""`plait batch`: runs a program once for each line of a JSON Lines or Parquet file, and writes a line for each result.

    {"index": 0, "input": {...}, "output": {"answer": ...}, "return": null, "error": null, "usage": {...}}

A line is appended when its item ends. At the end the lines are in the order of the input. A second run keeps the lines
without an error and runs the other items, with the seeds that they would have had.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from plait.lang.backends.default_backend import Backend
from plait.lang.batch import num_workers, progress
from plait.lang.cluster.settings import Cluster
from plait.lang.control.batch_output import TABLE_SUFFIX, OutputFile
from plait.lang.core.execution import Execution
from plait.lang.program import Program
from plait.runtime.errors import InputError

CHUNK_ITEMS = 2000  # states that are in memory at a time
MAX_SHOWN_INPUT = 1000  # characters of a line that is not an object


def run_batch_file(
    program: Program[Any],
    input_path: Path,
    output_path: Path,
    *,
    backend: Backend | None = None,
    cluster: Cluster | None = None,
    target: tuple[Path, str] | None = None,
    num_threads: int | None = None,
    progress_bar: bool = False,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Runs the program for each line of `input_path`: an object, the keyword arguments. Returns the numbers of lines
    and of those with an error.

    A line that is no object, or whose arguments do not fit the program, gets an error in its place. Raises InputError
    if a file cannot be read or written, or if `output_path` has the results of other input. Files whose names end with
    .parquet are tables (`batch_table.py`): a row is a line, and columns that are no arguments are left as they are.

    cluster: runs the items on its actors. target: the file that the program was loaded from, and its name there.
    """
    items = _read_items(program, input_path)
    output = _open_output(output_path, items, input_path)
    ready = _ready_items(program, items, output, input_path)
    threads: int | Literal["auto"] = "auto" if num_threads is None else num_threads
    if ready and cluster is not None:
        _run_on_cluster(program, ready, output, cluster, target, threads, progress_bar, sampling or {})
    elif ready:
        _run_here(program, ready, output, backend, threads, progress_bar, sampling or {})
    return output.finish()


def _ready_items(
    program: Program[Any], items: Mapping[int, Any], output: OutputFile, input_path: Path
) -> dict[int, dict[str, Any]]:
    """Returns the arguments of the items to run. The others are done, or get their error in the output."""
    is_table, ready = input_path.suffix == TABLE_SUFFIX, dict[int, dict[str, Any]]()
    for index, item in items.items():
        if index in output.done:
            continue
        try:
            if not isinstance(item, dict):
                raise InputError(f"line {index + 1} of {input_path.name} is not a JSON object")
            if is_table:
                item = {name: value for name, value in item.items() if program._arguments.takes(name)}
            place = f"{'row' if is_table else 'line'} {index + 1}"
            program._arguments.check(f"program {program.name!r}, {place}", (), item)
            ready[index] = program._arguments.with_bound((), item)
        except InputError as error:
            output.add(index, error=str(error))
    return ready


def _run_here(
    program: Program[Any],
    ready: Mapping[int, dict[str, Any]],
    output: OutputFile,
    backend: Backend | None,
    threads: int | Literal["auto"],
    progress_bar: bool,
    sampling: Mapping[str, Any],
) -> None:
    options, _ = program._arguments.split_sampling("batch", sampling)
    client = program._client("batch", backend, options)
    executions = []
    for index, arguments in ready.items():
        executions.append(Execution(program.name, program._body, (), arguments, client, options, None, index))
        executions[-1].on_done = partial(output.record, index)
    for first in range(0, len(executions), CHUNK_ITEMS):
        chunk = executions[first : first + CHUNK_ITEMS]
        output.abort_items = partial(_abort, chunk)
        program._run_all(chunk, threads, num_workers(threads, len(chunk)), progress_bar)
        output.check_written()


def _run_on_cluster(
    program: Program[Any],
    ready: Mapping[int, dict[str, Any]],
    output: OutputFile,
    cluster: Cluster,
    target: tuple[Path, str] | None,
    threads: int | Literal["auto"],
    progress_bar: bool,
    sampling: Mapping[str, Any],
) -> None:
    from plait.lang.cluster.batch import ClusterBatch, iter_on_cluster

    program._arguments.split_sampling("batch", sampling)  # checks them
    batch = ClusterBatch(program, ready, cluster, sampling, None, threads, target)
    with progress(len(ready), progress_bar) as step, contextlib.closing(iter_on_cluster(batch)) as ended:
        for index, state in ended:
            with contextlib.suppress(OSError):  # it is the output's write_error
                output.record(index, state)
            output.check_written()
            step()


def _abort(executions: list[Execution]) -> None:
    for execution in executions:
        execution.abort()


def _open_output(path: Path, items: Mapping[int, Any], input_path: Path) -> OutputFile:
    if path.suffix != TABLE_SUFFIX:
        return OutputFile(path, items)
    from plait.lang.control.batch_table import TableOutput

    return TableOutput(path, items, input_path)


def _read_items(program: Program[Any], path: Path) -> dict[int, Any]:
    """Returns the lines by number, from 0, without blank ones; a line that is not JSON as its text."""
    if path.suffix == TABLE_SUFFIX:
        from plait.lang.control.batch_table import read_rows

        return dict(read_rows(path, program._arguments.takes))
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
