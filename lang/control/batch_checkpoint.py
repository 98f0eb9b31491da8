"""`run_batch(..., resume="file.jsonl")`: each finished item is saved as a line of a file and is not run again.

A line is {"key": ..., "run": ...}, see `saved_runs.py`. The key is a digest of the program's source, the item's
arguments, the sampling keywords and the model's name, so changed items run again. Failed items, and items with a value
that cannot be written as JSON, have no line.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.lang.control.saved_runs import decode_run, encode_run
from plait.lang.control.saved_values import CannotSave, ValueCodec
from plait.lang.core.state import ProgramState
from plait.lang.sampling_options import Options
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.client.client import Client

_FORMAT = "2"  # part of every key; 0.1.0 had none and saved texts and variables only
_LINE_START = b'{"key": "'
_KEY = re.compile(r"[0-9a-f]{32}-\d+")


class BatchCheckpoint:
    """The checkpoint file of one batch. Raises InputError for an invalid file.

    keys: the key of each item, in order.
    """

    def __init__(
        self,
        path: str | Path,
        program: str,
        body: Callable[..., Any],
        items: Sequence[Mapping[str, Any]],
        options: Options,
        client: Client,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InputError(f'run_batch: resume takes the path of a file, such as "done.jsonl", not {path!r:.80}')
        self._path = Path(path)
        self._program = program
        self._lock = threading.Lock()
        self._client = client
        self._codec = ValueCodec(body)
        self.keys = _keys([_FORMAT, program, _source(body), Path(client.model.model_path).name], items, options)
        self._done = _read(self._path)

    def state(self, index: int) -> ProgramState | None:
        """Returns the saved state of an item; None if it was not finished or can no longer be read.

        It cannot be read if the class of one of its values no longer exists.
        """
        line = self._done.get(self.keys[index])
        if line is None:
            return None
        try:
            return decode_run(self._program, self._client, line["run"], self._codec)
        except CannotSave as error:
            warnings.warn(f"resume: item {index} runs again: its file has a value of {error}", stacklevel=3)
            return None

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
            with self._lock:
                _append_line(self._path, (json.dumps(line, ensure_ascii=False) + "\n").encode())
        except OSError as error:  # such as a full disk; the state in memory stays valid
            warnings.warn(f"resume: item {index} is not saved and will run again: {error}", stacklevel=3)


def _append_line(path: Path, line: bytes) -> None:
    """Appends a line. If that fails, removes what was written of it, so that the next line starts on its own."""
    with path.open("ab", buffering=0) as file:
        length = file.seek(0, os.SEEK_END)
        try:
            remaining = memoryview(line)
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError:
            file.truncate(length)
            raise


def _source(body: Callable[..., Any]) -> str:
    """Returns the source code of the body. For a body made by `plait.agent`, returns the agent's settings instead."""
    settings = getattr(body, "settings_text", None)
    if isinstance(settings, str):
        return settings
    try:
        return inspect.getsource(body)
    except (OSError, TypeError):  # a function that was typed into an interactive session has no source file
        code = getattr(body, "__code__", None)
        return "" if code is None else repr(code.co_code) + repr(code.co_consts)


def _keys(program_parts: list[str], items: Sequence[Mapping[str, Any]], options: Options) -> list[str]:
    shared: list[Any] = [*program_parts, sorted(options.fields.items(), key=lambda field: field[0]), options.n]
    shared += [] if options.same_seed is None else [options.same_seed]
    shared += [options.template_variables] if options.template_variables else []
    counts: Counter[str] = Counter()
    keys = []
    for index, item in enumerate(items):
        if not is_json(dict(item)):
            raise InputError(f"item {index} of run_batch has arguments that are not JSON values, as resume requires")
        digest = hashlib.sha256(json.dumps([shared, dict(item)], sort_keys=True).encode()).hexdigest()[:32]
        keys.append(f"{digest}-{counts[digest]}")  # the count distinguishes equal items
        counts[digest] += 1
    return keys


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the lines by key. Removes an incomplete last line, which a killed process leaves, from the file."""
    try:
        with path.open("ab"):
            pass  # reports an unwritable path before the first item runs
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"run_batch: resume: the file cannot be written: {error}") from None
    complete_lines = data[: data.rfind(b"\n") + 1]
    *texts, tail = data.split(b"\n")
    is_cut_off = tail[: len(_LINE_START)] == _LINE_START[: len(tail)] and not _is_whole(tail)
    texts += [] if is_cut_off or _line(tail) is not None else [tail]
    done: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(texts, 1):
        line = _line(text)
        if line is None:
            message = f"{path}, line {number}, is not a line that run_batch(resume=...) wrote"
            raise InputError(f"{message}; remove it, and its item runs again, or name another file")
        done[line["key"]] = line
    if len(complete_lines) < len(data):
        with path.open("rb+") as file:
            file.truncate(len(complete_lines))
    return done


def _line(text: bytes) -> dict[str, Any] | None:
    """Returns a line of such a file, also of version 0.1.0, whose items run again; None for any other text."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_own = isinstance(line, dict) and _KEY.fullmatch(str(line.get("key"))) and ("run" in line or "variables" in line)
    return line if is_own else None


def _is_whole(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_json(value: Any) -> bool:
    """Returns whether writing a value as JSON and reading it gives the same value (no tuples, objects, NaN, inf)."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    if type(value) is float:
        return value - value == 0
    return value is None or type(value) in (str, int, bool)
