"""The results of a batch while it runs: its two `ResultFile`s, and the counts of what they hold.

A line counts once it is written and fsynced. A part of a last line, which a crash left, is cut off: that line is
computed again. Any other line that cannot be read is damage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from plait.runtime.results.result_file import NotAResult, ResultFile
from plait.runtime.server.batches.records import Counts, TokenCounts

LINE_START = b'{"id":"'


class DamagedResults(Exception):
    """A file of results has a line that cannot be read."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """The usage of chat completions, completions and embeddings, or that of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    def add_to(self, tokens: TokenCounts) -> None:
        """Adds these counts to `tokens`."""
        tokens.input += self.prompt_tokens + self.input_tokens
        tokens.output += self.completion_tokens + self.output_tokens
        tokens.cached += _sum(self.prompt_tokens_details, self.input_tokens_details, "cached_tokens")
        tokens.reasoning += _sum(self.completion_tokens_details, self.output_tokens_details, "reasoning_tokens")


def _sum(first: _Details | None, second: _Details | None, name: str) -> int:
    return sum(getattr(details, name) or 0 for details in (first, second) if details is not None)


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _ResultLine(msgspec.Struct):
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

    def encode(self) -> bytes:
        """Returns the line with its end."""
        return msgspec.json.encode(self) + b"\n"


def digest(custom_id: str) -> bytes:
    """Returns a short digest of a custom id, of which a batch holds one for each line."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ResultLog:
    """The two result files of a batch. `done`: digests of the custom ids that have a line.

    reserve(n): is called before n bytes are appended, and may raise; a negative n takes back. The bytes that are there
    have been reserved. Opening raises DamagedResults and OSError.
    """

    def __init__(self, output: Path, errors: Path, reserve: Callable[[int], None]) -> None:
        self._reserve = reserve
        self.done: set[bytes] = set()
        self.counts, self.tokens = Counts(), TokenCounts()
        self._files = {True: self._open(output), False: self._open(errors)}  # by `ResultLine.is_success`
        for file in self._files.values():
            self._cut_off(file)

    def _open(self, path: Path) -> ResultFile:
        try:
            return ResultFile(path, self._count, LINE_START, is_durable=True)
        except NotAResult as error:
            text = f"the results in {path.name!r} are damaged at line {error.number}: {error.reason}"
            raise DamagedResults(text) from None

    def append(self, lines: Sequence[ResultLine]) -> None:
        """Appends lines, durably: all of them, or none if it raises OSError or what `reserve` raises."""
        encoded = {is_success: [line.encode() for line in lines if line.is_success == is_success]
                   for is_success in (True, False)}  # fmt: skip
        sizes = {is_success: file.size for is_success, file in self._files.items()}
        num_bytes = sum(map(len, encoded[True])) + sum(map(len, encoded[False]))
        self._reserve(num_bytes)
        try:
            for is_success, data in encoded.items():
                if data:
                    self._files[is_success].append(b"".join(data))
        except OSError:
            self._reserve(-num_bytes)
            for is_success, file in self._files.items():
                with contextlib.suppress(OSError):  # else the next append cuts it
                    file.cut(sizes[is_success])
            raise
        for line in (*encoded[True], *encoded[False]):
            self._count(line)

    def _cut_off(self, file: ResultFile) -> None:
        """Removes the part of a last line, and a file that has no other."""
        num_bytes = file.path.stat().st_size if file.path.exists() else 0
        if file.size:
            file.begin()
        elif num_bytes:
            file.remove()
        if file.size != num_bytes:
            self._reserve(file.size - num_bytes)

    def _count(self, line: bytes) -> None:
        try:
            result = msgspec.json.decode(line, type=_ResultLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from None
        self.done.add(digest(result.custom_id))
        response = result.response
        if response is None or response.status_code != 200:
            self.counts.failed += 1
            return
        self.counts.completed += 1
        if response.body.usage is not None:
            response.body.usage.add_to(self.tokens)
