"""`Replay(path)`: a backend that answers each call from a recording, and reports how an unrecorded call differs."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from plait.lang.backends.default_backend import Backend, BackendOfBlock
from plait.lang.cluster.prefix_groups import num_common_chars
from plait.lang.testing.record_format import (
    VERSION,
    call_record,
    differences,
    parse_outcome,
    record_key,
)
from plait.lang.testing.recording import Recording
from plait.lang.testing.script_answers import ScriptError, describe_call
from plait.lang.testing.text_client import Asked, Outcome, TextClient, byte_tokenizer
from plait.runtime.errors import InputError
from plait.runtime.tokenizer.chat_template import ChatTemplate


class ReplayMismatch(ScriptError):
    """A call was not recorded. The message says how it differs from the most similar recorded call. Record again after
    a change of the program."""


class Replay(BackendOfBlock, TextClient):
    """A backend that answers from the recording at `path`. Each call must have a recorded prompt and recorded
    parameters; it returns the recorded value, meta info and usage. Equal calls are answered in the order in which they
    were recorded.

    Inside a `with` block it is the default backend. At the end of the block, recorded calls that were not made raise a
    ScriptError (unless `all_used=False`).

    >>> with Replay("tests/ask.jsonl"):                                  # doctest: +SKIP
    ...     assert ask.run("Why is the sky blue?", temperature=0)["kind"] == "a fact"
    """

    has_adapters = True

    def __init__(self, path: str | Path, *, all_used: bool = True) -> None:
        self._path, self._all_used = Path(path), all_used
        first, self._lines = _read(self._path)
        template = None if first["chat_template"] is None else ChatTemplate(*first["chat_template"])
        super().__init__(byte_tokenizer(template, first["control_texts"]), first["model"], first["context_length"])
        self._lock = threading.Lock()
        self._remaining: dict[str, deque[int]] = defaultdict(deque)
        for index, line in enumerate(self._lines):
            self._remaining[record_key(line)].append(index)
        self._errors: list[ScriptError] = []

    def answer(self, asked: Asked) -> Outcome:
        line = call_record(asked)
        with self._lock:
            indices = self._remaining.get(record_key(line))
            index = indices.popleft() if indices else None
        if index is None:
            error = ReplayMismatch(self._mismatch_message(asked, line))
            self._errors.append(error)
            raise error
        return parse_outcome(self._lines[index])

    def check(self) -> None:
        """Raises ScriptError for the first call that was not recorded, otherwise for recorded calls that were not
        made."""
        if self._errors:
            raise type(self._errors[0])(str(self._errors[0]))
        unused = sorted(index for indices in self._remaining.values() for index in indices)
        if unused and self._all_used:
            names = ", ".join(f"{self._lines[index]['name']!r} (line {index + 2})" for index in unused[:5])
            raise ScriptError(f"{self._path}: {len(unused)} recorded calls were not made: {names}")

    def _end_block(self, succeeded: bool) -> None:
        if succeeded:
            self.check()

    def _mismatch_message(self, asked: Asked, line: dict[str, Any]) -> str:
        """Returns why this call has no answer: its differences from the most similar recorded call."""
        if record_key(line) in self._remaining:
            return f"{self._path}: {describe_call(asked)} is made more often than it was recorded"
        same_kind = [
            index
            for index, recorded_line in enumerate(self._lines)
            if (recorded_line["choices"] is None) == (line["choices"] is None)
        ]
        if not same_kind:
            return f"{self._path}: no call like {describe_call(asked)} was recorded"

        def similarity(index: int) -> tuple[bool, bool, int]:
            recorded_line = self._lines[index]
            return (
                recorded_line["name"] == line["name"],
                recorded_line["prompt"] == line["prompt"],
                num_common_chars(recorded_line["prompt"], line["prompt"]),
            )

        nearest = max(same_kind, key=similarity)
        phrases = "; ".join(differences(self._lines[nearest], line))
        where = f"{self._path}, line {nearest + 2}"
        return f"{describe_call(asked)} was not recorded. It differs from the most similar call ({where}) in {phrases}"


def recorded(path: str | Path, backend: Backend | None = None) -> Recording | Replay:
    """Returns a Replay of `path` if the file exists, otherwise a Recording to it. Delete the file to record again.

    >>> with recorded("tests/ask.jsonl"):                                # doctest: +SKIP
    ...     assert "blue" in ask.run("Why is the sky blue?", temperature=0)["answer"]
    """
    return Replay(path) if Path(path).exists() else Recording(path, backend)


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if number == 1:
                if line["plait_recording"] != VERSION:
                    raise InputError(f"{path} was recorded by another version of plait; delete it and record again")
            else:
                record_key(line)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}, line {number}, is not a line of a recording") from None
        lines.append(line)
    if not lines:
        raise InputError(f"{path} is empty, so it is not a recording")
    return lines[0], lines[1:]
