"""`plait batch`: runs a program once for each line of a JSON Lines or Parquet file, and writes a line for each result.

    {"index": 0, "input": {...}, "output": {"answer": ...}, "return": null, "error": null, "usage": {...}}

A line is appended when its item ends. At the end the lines are in the order of the input. A second run keeps the lines
without an error and runs the other items, with the seeds that they would have had.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from plait.lang.backends.cluster import Cluster
from plait.lang.batches.item_log import batch_identity
from plait.lang.batches.output import TABLE_SUFFIX, OutputFile
from plait.lang.execution.threads import progress
from plait.lang.program import Program
from plait.lang.program_batch import ProgramBatch
from plait.lang.sampling_options import run_options
from plait.runtime.errors import InputError
from plait.runtime.results.json_lines import parse_json_line

CHUNK_ITEMS = 2000  # states that are in memory at a time
MAX_SHOWN_INPUT = 1000  # characters of a line that is not an object


def run_batch_file(
    program: Program[Any],
    input_path: Path,
    output_path: Path,
    *,
    cluster: Cluster | None,
    target: tuple[Path, str],
    num_threads: int | None,
    progress_bar: bool,
    sampling: Mapping[str, Any],
) -> tuple[int, int]:
    """Runs the program for each line of `input_path`: an object, the keyword arguments. Returns the numbers of lines
    and of those with an error.

    A line that is no object, or whose arguments do not fit the program, gets an error in its place. Raises InputError
    if a file cannot be read or written, or if `output_path` has the results of other input. Files whose names end with
    .parquet are tables (`batch_table.py`): a row is a line, and columns that are no arguments are left as they are.

    cluster: runs the items on its actors. target: the file that the program was loaded from, and its name there.
    """
    options = run_options("batch", sampling)
    items, reasons = _read_items(program, input_path)
    identity = batch_identity(program.name, program._body, program._arguments.bound, options)
    output = _open_output(output_path, items, identity, input_path)
    ready = _ready_items(program, items, reasons, output, input_path)
    threads: int | Literal["auto"] = "auto" if num_threads is None else num_threads
    if not ready:
        output.begin(None)
        return output.finish()
    batch = ProgramBatch(program, ready, sampling, options, None, threads, output, target)
    if cluster is not None:
        _run_on_cluster(batch, cluster, output, progress_bar)
    else:
        _run_here(batch, output, progress_bar)
    return output.finish()


def _ready_items(
    program: Program[Any],
    items: Mapping[int, Any],
    reasons: Mapping[int, str],
    output: OutputFile,
    input_path: Path,
) -> dict[int, dict[str, Any]]:
    """Returns the arguments of the items to run. The others are done, or get their error in the output."""
    is_table, ready = input_path.suffix == TABLE_SUFFIX, dict[int, dict[str, Any]]()
    for index, item in items.items():
        if index in output.done:
            continue
        try:
            if index in reasons or not isinstance(item, dict):
                reason = f": {reasons[index]}" if index in reasons else ""
                raise InputError(f"line {index + 1} of {input_path.name} is not a JSON object{reason}")
            if is_table:
                item = {name: value for name, value in item.items() if program._arguments.takes(name)}
            place = f"{'row' if is_table else 'line'} {index + 1}"
            program._arguments.check(f"program {program.name!r}, {place}", (), item)
            ready[index] = program._arguments.with_bound((), item)
        except InputError as error:
            output.refused[index] = str(error)
    return ready


def _run_here(batch: ProgramBatch, output: OutputFile, progress_bar: bool) -> None:
    client = batch.program._client("batch", None, batch.options)
    output.begin(client)
    indices = iter(batch.items)
    while chunk := list(itertools.islice(indices, CHUNK_ITEMS)):
        output.running = batch.executions(client, chunk)
        batch.run_here(output.running, progress_bar)
        output.check_written()


def _run_on_cluster(batch: ProgramBatch, cluster: Cluster, output: OutputFile, progress_bar: bool) -> None:
    from plait.lang.cluster.batch import iter_on_cluster

    with progress(len(batch.items), progress_bar) as step, contextlib.closing(iter_on_cluster(batch, cluster)) as ended:
        for _ in ended:
            output.check_written()
            step()


def _open_output(path: Path, items: Mapping[int, Any], identity: Mapping[str, str], input_path: Path) -> OutputFile:
    if path.suffix != TABLE_SUFFIX:
        return OutputFile(path, items, identity)
    from plait.lang.batches.table import TableOutput

    return TableOutput(path, items, identity, input_path)


def _read_items(program: Program[Any], path: Path) -> tuple[dict[int, Any], dict[int, str]]:
    """Returns the lines by number, from 0, without blank ones, and the reasons why some are not JSON.

    A line that is not JSON is its text.
    """
    if path.suffix == TABLE_SUFFIX:
        from plait.lang.batches.table import read_rows

        return dict(read_rows(path, program._arguments.takes)), {}
    items, reasons = dict[int, Any](), dict[int, str]()
    try:
        with path.open("rb") as file:
            for index, line in enumerate(file):
                line = line.rstrip(b"\r\n")
                if not line.strip():
                    continue
                try:
                    items[index] = parse_json_line(line)
                except ValueError as error:
                    items[index] = line.decode("utf-8", "backslashreplace")[:MAX_SHOWN_INPUT]
                    reasons[index] = str(error)
    except OSError as error:
        raise InputError(f"the input cannot be read: {error}") from None
    return items, reasons
