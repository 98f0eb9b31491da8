"""`run_batch(..., resume="file.jsonl")`: each finished item is saved as a line of a file and is not run again.

A line is {"key": ..., "run": ...}, see `item_log.py` and `saved_runs.py`. Changed items have another key, so they run
again, and the lines of the earlier ones stay. Failed items, and items with a value that cannot be written as JSON, have
no line.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.lang.batches.item_log import item_keys, model_name
from plait.lang.batches.saved_runs import decode_run, encode_run
from plait.lang.batches.saved_values import CannotSave, ValueCodec
from plait.lang.program_arguments import named_arguments
from plait.lang.sampling_options import Options
from plait.lang.states.state import ProgramState
from plait.runtime.errors import InputError
from plait.runtime.results.json_lines import encode_json_line
from plait.runtime.results.result_file import NotAResult, ResultFile

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient

_LINE_START = b'{"key": "'
_KEY = re.compile(r"[0-9a-f]{32}-\d+")


class BatchCheckpoint:
    """The `ItemLog` of `run_batch(resume=)`. `items`: index -> arguments. Raises InputError for an invalid file.

    keys: the key of each item, by its index, from `begin` on.
    """

    def __init__(
        self,
        path: str | Path,
        program: str,
        body: Callable[..., Any],
        items: Mapping[int, Mapping[str, Any]],
        options: Options,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InputError(f'run_batch: resume takes the path of a file, such as "done.jsonl", not {path!r:.80}')
        self._path = Path(path)
        self._program, self._body, self._items, self._options = program, body, items, options
        self._codec = ValueCodec(body)
        self._done: dict[str, dict[str, Any]] = {}
        self.keys: dict[int, str] = {}

    def begin(self, client: BackendClient) -> dict[int, ProgramState]:
        """Returns the saved states.

        An item whose state cannot be read any more, since the class of one of its values is gone, runs again.
        """
        items = list(self._items.values())
        keys = item_keys(self._program, self._body, items, self._options, model_name(client))
        self.keys = dict(zip(self._items, keys, strict=True))
        try:
            self._file = ResultFile(self._path, self._take, _LINE_START)
            self._file.begin()  # reports an unwritable path before the first item runs
        except NotAResult as error:
            raise InputError(f"{error}; remove it, and its item runs again, or name another file") from None
        except OSError as error:
            raise InputError(f"run_batch: resume: the file cannot be written: {error}") from None
        states = {}
        for index, key in self.keys.items():
            if (line := self._done.pop(key, None)) is not None:
                try:
                    states[index] = decode_run(self._program, client, line["run"], self._codec)
                    states[index]._run.arguments = named_arguments(self._body, (), self._items[index])
                except CannotSave as error:
                    warnings.warn(f"resume: item {index} runs again: its file has a value of {error}", stacklevel=3)
        return states

    def record(self, index: int, state: ProgramState) -> None:
        """Saves an item that finished without an error.

        Warns, and saves nothing, if a value of the item cannot be written as JSON or if writing to the file fails.
        """
        if state._run.error is not None or state.error() is not None:
            return
        try:
            line = {"key": self.keys[index], "run": encode_run(state, self._codec)}
        except CannotSave as error:
            message = f"resume: item {index} is not saved and will run again: {error}; save its text, s.text_of(...)"
            warnings.warn(message, stacklevel=3)
            return
        try:
            self._file.append(encode_json_line(line))
        except OSError as error:  # such as a full disk; the state in memory stays valid
            warnings.warn(f"resume: item {index} is not saved and will run again: {error}", stacklevel=3)

    def _take(self, text: bytes) -> None:
        """Takes a line of the file. Those of version 0.1.0 have no runs, and their items run again."""
        try:
            line = json.loads(text)  # files of earlier versions may have infinite logprobs
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or not _KEY.fullmatch(str(line.get("key"))) or not {"run", "variables"} & {*line}:
            raise ValueError("is not a line that run_batch(resume=...) wrote")
        self._done[line["key"]] = line
