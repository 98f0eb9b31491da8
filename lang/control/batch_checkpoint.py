"""`run_batch(..., resume="file.jsonl")`: each item that is done is a line of a file, and is not run again.

A line is {"key": ..., "text": ..., "messages": ..., "variables": ..., "ret_value": ...}. Its key is a digest of the
program's source, the item's arguments, the sampling keywords and the model's name: what was changed runs anew. Items
that failed have no line.
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
    """The file of one batch. `keys` has one for each item, in order."""

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
        """The state of an item that was done before, to be read like any other; None where it was not."""
        line = self._done.get(self.keys[index])
        return None if line is None else _restore_state(self._program, self._client, line)

    def record(self, index: int, state: ProgramState) -> None:
        """Writes the line of an item that is done. One that failed has none; one that JSON cannot keep fails."""
        run = state._run
        if run.error is not None or state.error() is not None:
            return
        variables = {name: state[name] for name in list(state._branch.variables)}
        line = {"key": self.keys[index], "text": state.text(), "messages": state.messages(), "variables": variables,
                "ret_value": state.ret_value}  # fmt: skip
        for name, value in [*variables.items(), ("the return value", state.ret_value)]:
            if not _is_plain(value):
                why = (
                    f"resume keeps what JSON can: {name} is a {type(value).__name__}; keep its text with s.text_of(...)"
                )
                run.fail(program_error(self._program, None, InputError(why)))
                return
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _source(body: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(body)
    except (OSError, TypeError):  # typed into a prompt
        code = getattr(body, "__code__", None)
        return "" if code is None else repr(code.co_code) + repr(code.co_consts)


def _keys(of_all: list[str], items: Sequence[Mapping[str, Any]], options: Options) -> list[str]:
    said = [*of_all, sorted(options.fields.items(), key=lambda each: each[0]), options.n]
    seen: Counter[str] = Counter()
    keys = []
    for index, item in enumerate(items):
        if not _is_plain(dict(item)):
            raise InputError(f"item {index} of run_batch has arguments that JSON cannot keep, as resume needs")
        digest = hashlib.sha256(json.dumps([said, dict(item)], sort_keys=True).encode()).hexdigest()[:32]
        keys.append(f"{digest}-{seen[digest]}")  # equal items are told apart by their order
        seen[digest] += 1
    return keys


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The lines by key. A last line that was cut off, by a kill or a full disk, is taken out of the file."""
    with path.open("ab"):
        pass  # a path that cannot be written is an error now, not after the first item
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    done: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
            done[line["key"]] = line
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}, line {number}, is not a line that run_batch(resume=...) wrote") from None
    if len(whole) < len(data):
        with path.open("rb+") as file:
            file.truncate(len(whole))
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
    """Whether JSON gives it back as it is: no tuples, no objects, no NaN."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if type(value) is float:
        return value - value == 0
    return value is None or type(value) in (str, int, bool)
