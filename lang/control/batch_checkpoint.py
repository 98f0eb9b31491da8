"""`run_batch(..., resume="file.jsonl")`: each finished item is saved as a line of a file and is not run again.

A line is {"key": ..., "text": ..., "messages": ..., "variables": ..., "ret_value": ...}. The key is a digest of the
program's source, the item's arguments, the sampling keywords and the model's name, so changed items run again. Failed
items have no line.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.lang.core.branch import Branch
from plait.lang.core.results import AssignedValue, TextSegment
from plait.lang.core.run import Run
from plait.lang.core.state import ProgramState
from plait.lang.errors import program_error
from plait.lang.sampling_options import Options
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.client.client import Client


class BatchCheckpoint:
    """The checkpoint file of one batch. `keys`: one key per item, in order. Raises InputError for an invalid file."""

    def __init__(
        self,
        path: str | Path,
        program: str,
        body: Callable[..., Any],
        items: Sequence[Mapping[str, Any]],
        options: Options,
        client: Client,
    ) -> None:
        self._path = Path(path)
        self._program = program
        self._lock = threading.Lock()
        self._client = client
        self.keys = _keys([program, _source(body), Path(client.model.model_path).name], items, options)
        self._done = _read(self._path)

    def state(self, index: int) -> ProgramState | None:
        """Returns the saved state of an item, or None if the item was not finished before."""
        line = self._done.get(self.keys[index])
        return None if line is None else _restore_state(self._program, self._client, line)

    def record(self, index: int, state: ProgramState) -> None:
        """Saves a finished item. A failed item is not saved. An item that JSON cannot represent fails."""
        run = state._run
        if run.error is not None or state.error() is not None:
            return
        variables = {name: state[name] for name in list(state._branch.variables)}
        line = {"key": self.keys[index], "text": state.text(), "messages": state.messages(), "variables": variables,
                "ret_value": state.ret_value}  # fmt: skip
        for name, value in [*variables.items(), ("the return value", state.ret_value)]:
            if not _is_plain(value):
                message = (
                    f"resume saves JSON values only: {name} is a {type(value).__name__}; use its text, s.text_of(...)"
                )
                run.fail(program_error(self._program, None, InputError(message)))
                return
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _source(body: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(body)
    except (OSError, TypeError):  # a function typed into an interactive session has no source file
        code = getattr(body, "__code__", None)
        return "" if code is None else repr(code.co_code) + repr(code.co_consts)


def _keys(program_parts: list[str], items: Sequence[Mapping[str, Any]], options: Options) -> list[str]:
    shared = [*program_parts, sorted(options.fields.items(), key=lambda field: field[0]), options.n]
    shared += [] if options.same_seed is None else [options.same_seed]
    counts: Counter[str] = Counter()
    keys = []
    for index, item in enumerate(items):
        if not _is_plain(dict(item)):
            raise InputError(f"item {index} of run_batch has arguments that are not JSON values, as resume requires")
        digest = hashlib.sha256(json.dumps([shared, dict(item)], sort_keys=True).encode()).hexdigest()[:32]
        keys.append(f"{digest}-{counts[digest]}")  # equal items are distinguished by their order
        counts[digest] += 1
    return keys


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the lines by key. Removes an incomplete last line, left by a kill or a full disk, from the file."""
    with path.open("ab"):
        pass  # reports an unwritable path now and not after the first item
    data = path.read_bytes()
    complete_lines = data[: data.rfind(b"\n") + 1]
    done: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(complete_lines.splitlines(), 1):
        try:
            line = json.loads(text)
            done[line["key"]] = line
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}, line {number}, is not a line that run_batch(resume=...) wrote") from None
    if len(complete_lines) < len(data):
        with path.open("rb+") as file:
            file.truncate(len(complete_lines))
    return done


def _restore_state(program: str, client: Client, line: Mapping[str, Any]) -> ProgramState:
    run = Run(program, client, Options())
    branch = Branch(run)
    branch.segments.append(TextSegment(line["text"]))
    branch.variables.update({name: AssignedValue(value) for name, value in line["variables"].items()})
    branch.restored_messages = line["messages"]
    run.ret_value = line["ret_value"]
    run.end()
    return ProgramState(branch, is_external=True)


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON unchanged: no tuples, no objects, no NaN or infinity."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if type(value) is float:
        return value - value == 0
    return value is None or type(value) in (str, int, bool)
