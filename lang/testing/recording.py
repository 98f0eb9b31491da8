"""`Recording(path, backend)`: a backend that forwards everything to another one and writes each call to a file."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from plait.constrained.specs import Spec
from plait.lang.backends.default_backend import Backend, BackendOfBlock, resolve_client
from plait.lang.meta_info import CallMeta, choice_meta, generation_meta
from plait.lang.testing.record_format import RECORDING_START, call_record, failure_record, header, outcome_record
from plait.lang.testing.text_client import Asked, Outcome
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call
from plait.runtime.errors import CallFailed, InputError
from plait.runtime.messages import SelectMethod
from plait.runtime.programs.backend import BackendSession
from plait.runtime.results.result_file import may_replace
from plait.runtime.sampling_params import SamplingParams, sampling_params

_USAGE = Usage.__struct_fields__  # the meta info contains these fields too; a recording stores them separately
_Part = str | Call  # known text, or a call that adds its text


class Recording(BackendOfBlock):
    """A backend that forwards its calls to `backend` (None: the default backend) and writes them, with their results,
    to the file `path`.

    Inside a `with` block it is the default backend. The file is complete when the block ends without an exception;
    until then its name is `path` with ".part" appended. Both names may be those of earlier recordings; for any other
    file InputError is raised. `Replay(path)` returns the same values, meta info and usage.

    >>> with Recording("tests/ask.jsonl"):                               # doctest: +SKIP
    ...     ask.run("Why is the sky blue?")
    """

    def __init__(self, path: str | Path, backend: Backend | None = None) -> None:
        self._path = Path(path)
        self._part = self._path.with_name(self._path.name + ".part")
        for file in (self._path, self._part):
            _check_replaceable(file)
        self._inner = resolve_client(backend)
        self._lock = threading.Lock()
        self._file: IO[str] | None = self._part.open("w", encoding="utf-8")
        self._calls: list[Call] = []
        self._write(header(self._inner))

    def open_session(self, *, program: int | None = None) -> RecordedSession:
        return RecordedSession(self, self._inner.open_session(program=program))

    def __getattr__(self, name: str) -> Any:
        """Forwards everything else (model, tokenizer, ids, status) to the recorded backend."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def close(self) -> None:
        """Waits for running calls and renames the file to its final name. The recorded backend stays open."""
        for call in list(self._calls):
            with contextlib.suppress(CallFailed):
                call.result()
        self._end(keep=True)

    def record_call(self, call: Call, asked: Asked, before: Sequence[_Part]) -> None:
        """Writes the line of `call` when it has ended. `before`: the parts of its prompt."""
        written = threading.Event()

        def write_when_done() -> None:
            if call.done() and not written.is_set():
                written.set()
                self._write_call(call, asked, before)

        with self._lock:
            self._calls.append(call)
        call.add_listener(write_when_done)
        write_when_done()

    def _write_call(self, call: Call, asked: Asked, before: Sequence[_Part]) -> None:
        try:
            prompt = "".join(part if isinstance(part, str) else part.result().text for part in before)
        except CallFailed:
            return  # an earlier call failed, so this one never had a prompt
        line = call_record(replace(asked, prompt=prompt))
        try:
            outcome = self._outcome(call, asked)
        except CallFailed as error:
            self._write(line | failure_record(error))
            return
        self._write(line | outcome_record(outcome))

    def _outcome(self, call: Call, asked: Asked) -> Outcome:
        result, tokenizer = call.result(), self._inner.tokenizer
        if asked.choices is None:
            meta: CallMeta = generation_meta(result, tokenizer)
        else:
            meta = choice_meta(result, call.scored_choices, tokenizer)
        extra_meta = {name: value for name, value in meta.items() if name not in ("finish_reason", *_USAGE)}
        num_tokens = len(result.token_ids)
        return Outcome(result.text, result.finish_reason, result.matched, result.usage, num_tokens, extra_meta or None)

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _end(self, keep: bool) -> None:
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()
            if not keep:
                self._part.unlink()
                return
            _check_replaceable(self._path)
            self._part.replace(self._path)

    def _end_block(self, succeeded: bool) -> None:
        if succeeded:
            self.close()
        else:
            self._end(keep=False)


def _check_replaceable(path: Path) -> None:
    if not may_replace(path, RECORDING_START):
        raise InputError(f"{str(path)!r:.200} is not a recording; remove it or name another file")


class RecordedSession:
    """A session of the recorded backend, together with its text."""

    def __init__(
        self, recording: Recording, inner: BackendSession, parts: Sequence[_Part] = (), adapter: str = ""
    ) -> None:
        self._recording, self._adapter = recording, adapter
        self._inner = inner
        self._parts: list[_Part] = list(parts)
        self._name: str | None = None

    def set_next_call_name(self, name: str | None) -> None:
        """Sets the variable of the next call."""
        self._name = name
        self._inner.set_next_call_name(name)

    def append(self, text: str, *, control: bool = False) -> None:
        self._inner.append(text, control=control)
        self._parts.append(text)

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        raise InputError("a recording stores text, so token ids cannot be appended")

    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> Call:
        call = self._inner.generate(params, constraint, trailing_text)
        self._record(call, Asked(self._name, "", params, constraint, adapter=self._adapter))
        self._parts.append(trailing_text)
        return call

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Call:
        call = self._inner.select(choices, method, timeout_s, seed)
        asked = Asked(self._name, "", sampling_params(), None, tuple(choices), method, self._adapter)
        return self._record(call, asked)

    def fork(self, size: int, adapter: str | None = None) -> list[RecordedSession]:
        children, name = self._inner.fork(size, adapter), self._adapter if adapter is None else adapter
        return [RecordedSession(self._recording, child, self._parts, name) for child in children]

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def _record(self, call: Call, asked: Asked) -> Call:
        self._name = None
        self._recording.record_call(call, asked, tuple(self._parts))
        self._parts.append(call)
        return call
