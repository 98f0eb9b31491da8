"""The results of a batch while it runs: its two `ResultFile`s, and the counts of what they hold.

A line counts once it is written and fsynced. A part of a last line, which a crash left, is cut off: that line is
computed again. Any other line that cannot be read is damage.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from plait.runtime.results.result_file import NotAResult, ResultFile
from plait.runtime.server.batches.records import BatchUsage, Counts, failure

LINE_START = b'{"id":"'


class _Body(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _StoredLine(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


class ResultLine(msgspec.Struct):
    """One line of a result file, in OpenAI's form. `response` or `error` is null."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: dict[str, str] | None

    @property
    def is_success(self) -> bool:
        """Whether the line belongs to the output file, not to the error file."""
        return self.response is not None and self.response["status_code"] == 200


def digest(custom_id: str) -> bytes:
    """Returns a short digest of a custom id, of which a batch holds one for each line."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ResultLog:
    """The two result files of a batch. `done`: digests of the custom ids that have a line.

    reserve(n): is called before n bytes are appended, and may raise; a negative n takes back. The bytes that are there
    have been reserved. Opening raises BatchFailed and OSError.
    """

    def __init__(self, output: Path, errors: Path, reserve: Callable[[int], None]) -> None:
        self._reserve = reserve
        self.done: set[bytes] = set()
        self.counts, self.usage = Counts(), BatchUsage()
        self._files = {True: self._open(output), False: self._open(errors)}  # by `ResultLine.is_success`
        self._pending: list[tuple[ResultLine, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    def _open(self, path: Path) -> ResultFile:
        num_bytes = path.stat().st_size if path.exists() else 0
        try:
            file = ResultFile(path, self._count, LINE_START, is_durable=True)
        except NotAResult as error:
            text = f"the results in {path.name!r} are damaged at line {error.number}: {error.reason}"
            raise failure("damaged_results", f"{text}; the batch cannot be continued") from None
        if num_bytes > file.size:
            file.begin()
            self._reserve(file.size - num_bytes)
        return file

    # -- writing ----------------------------------------------------------------------------------

    async def put(self, line: ResultLine) -> None:
        """Stores a line, in a thread, also if the caller is cancelled. Lines that come while others are written are
        written together, in their order. Raises what `append` raises."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((line, stored))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())
        await asyncio.shield(stored)

    async def flush(self) -> None:
        """Waits until all lines are written."""
        while self._task is not None and not self._task.done():
            await asyncio.shield(self._task)

    async def _write(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, []
            try:
                await asyncio.to_thread(self.append, [line for line, _ in pending])
            except Exception as error:
                for _, stored in pending:
                    stored.set_exception(error)
                    stored.exception()  # retrieved, also where nobody waits for it any more
            else:
                for _, stored in pending:
                    stored.set_result(None)

    def append(self, lines: Sequence[ResultLine]) -> None:
        """Appends lines, durably. Raises OSError, and what `reserve` raises: those of one file may then be stored."""
        for is_success, file in self._files.items():
            encoded = [msgspec.json.encode(line) + b"\n" for line in lines if line.is_success == is_success]
            data = b"".join(encoded)
            if not data:
                continue
            self._reserve(len(data))
            try:
                file.append(data)
            except OSError:
                self._reserve(-len(data))
                raise
            for line in encoded:
                self._count(line)

    def _count(self, line: bytes) -> None:
        try:
            result = msgspec.json.decode(line, type=_StoredLine)
            response = result.response
            if response is None or response.status_code != 200:
                self.counts.failed += 1
            else:
                self.counts.completed += 1
                add_usage(self.usage, response.body.usage or {})
        except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, TypeError) as error:
            raise ValueError(str(error)) from None
        self.done.add(digest(result.custom_id))


def add_usage(total: BatchUsage, usage: dict[str, Any]) -> None:
    """Adds the usage of chat completions, completions and embeddings, or that of responses."""
    for inputs, outputs in (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")):
        total.input_tokens += usage.get(inputs, 0)
        total.output_tokens += usage.get(outputs, 0)
        total.input_tokens_details.cached_tokens += (usage.get(f"{inputs}_details") or {}).get("cached_tokens") or 0
        details = usage.get(f"{outputs}_details") or {}
        total.output_tokens_details.reasoning_tokens += details.get("reasoning_tokens") or 0
    total.total_tokens = total.input_tokens + total.output_tokens
