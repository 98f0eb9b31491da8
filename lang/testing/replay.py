"""`Replay(path)`: a backend that answers each call with what was recorded of it, and says what differs where it cannot."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.lang.backends.default_backend import Backend, default_backend, set_default_backend
from plait.lang.testing.record_format import (
    VERSION,
    call_record,
    common_prefix_length,
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
    """A call was not recorded; the message says what differs from the nearest one that was."""


class Replay(TextClient):
    """A backend that plays the recording at `path`: every call must have been asked the same, prompt and parameters,
    and gets its values, meta information and usage again. Equal calls are answered in the order they were recorded.

    In a `with` block it is the default backend, and calls that were recorded but not asked are a ScriptError at its
    end (not with `all_used=False`).

    >>> with Replay("tests/ask.jsonl"):                                  # doctest: +SKIP
    ...     assert ask.run("Why is the sky blue?", temperature=0)["kind"] == "a fact"
    """

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
        self._previous_backend: Backend | None = None

    @property
    def client(self) -> Replay:
        return self

    def answer(self, asked: Asked) -> Outcome:
        line = call_record(asked)
        with self._lock:
            left = self._remaining.get(record_key(line))
            index = left.popleft() if left else None
        if index is None:
            error = ReplayMismatch(self._mismatch_message(asked, line))
            self._errors.append(error)
            raise error
        return parse_outcome(self._lines[index])

    def check(self) -> None:
        """Raises ScriptError for the first call that was not recorded, else for recorded calls that nobody asked."""
        if self._errors:
            raise type(self._errors[0])(str(self._errors[0]))
        left = sorted(index for indices in self._remaining.values() for index in indices)
        if left and self._all_used:
            names = ", ".join(f"{self._lines[index]['name']!r} (line {index + 2})" for index in left[:5])
            raise ScriptError(f"{self._path}: {len(left)} recorded calls were not asked: {names}")

    def __enter__(self) -> Replay:
        self._previous_backend = default_backend()
        set_default_backend(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        set_default_backend(self._previous_backend)
        if kind is None:
            self.check()

    def _mismatch_message(self, asked: Asked, line: dict[str, Any]) -> str:
        """Why this call has no answer: what differs from the nearest recorded one."""
        if record_key(line) in self._remaining:
            return f"{self._path}: {describe_call(asked)} is asked the same more often than it was recorded"
        same_kind = [i for i, each in enumerate(self._lines) if (each["choices"] is None) == (line["choices"] is None)]
        if not same_kind:
            return f"{self._path}: nothing of {describe_call(asked)} was recorded"

        def nearness(index: int) -> tuple[bool, bool, int]:
            each = self._lines[index]
            return (
                each["name"] == line["name"],
                each["prompt"] == line["prompt"],
                common_prefix_length(each["prompt"], line["prompt"]),
            )

        nearest = max(same_kind, key=nearness)
        told = "; ".join(differences(self._lines[nearest], line))
        where = f"{self._path}, line {nearest + 2}"
        return f"{describe_call(asked)} was not recorded. From the nearest call ({where}) differs {told}"


def recorded(path: str | Path, backend: Backend | None = None) -> Recording | Replay:
    """Replays the recording at `path` where there is one, and otherwise makes it. To record anew, delete the file.

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
                    raise InputError(f"{path} is a recording of another version; delete it and record anew")
            else:
                record_key(line)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}, line {number}, is not a line of a recording") from None
        lines.append(line)
    if not lines:
        raise InputError(f"{path} is empty: it is no recording")
    return lines[0], lines[1:]
