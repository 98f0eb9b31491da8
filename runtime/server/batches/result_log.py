"""The results of a batch while it runs: two files to which lines are appended, and what they hold after a crash.

A line counts once it is written and fsynced. A crash can leave a part of a last line, which is cut off at the next
start: that line is computed again. Any other line that cannot be read is damage.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from plait.runtime.server.batches.directory import FILE_MODE, write_all
from plait.runtime.server.batches.records import Counts, TokenCounts

READ_BYTES = 1 << 20


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

    reserve(n): is called before n bytes are appended, and may raise; a negative n takes back. `recovered_bytes`: of the
    lines that were there.
    Opening raises DamagedResults and OSError.
    """

    def __init__(self, output: Path, errors: Path, reserve: Callable[[int], None]) -> None:
        self._reserve = reserve
        self.done: set[bytes] = set()
        self.counts, self.tokens = Counts(), TokenCounts()
        self._paths = {True: output, False: errors}  # by `ResultLine.is_success`
        self._files: dict[bool, int] = {}
        self._sizes: dict[bool, int] = {}
        try:
            for is_success, path in self._paths.items():
                self._files[is_success], self._sizes[is_success] = _open(path), -1
                self._sizes[is_success] = self._recover(is_success, path)
            self.recovered_bytes = sum(self._sizes.values())
        except BaseException:
            self.close()
            raise

    def append(self, lines: Sequence[ResultLine]) -> None:
        """Appends lines, durably: all of them, or none if it raises OSError or what `reserve` raises."""
        encoded = {is_success: b"".join(line.encode() for line in lines if line.is_success == is_success)
                   for is_success in (True, False)}  # fmt: skip
        num_bytes = sum(map(len, encoded.values()))
        self._reserve(num_bytes)
        try:
            for is_success, data in encoded.items():
                if data:
                    write_all(self._files[is_success], data)
                    os.fsync(self._files[is_success])
        except OSError:
            self._reserve(-num_bytes)
            for is_success, descriptor in self._files.items():
                os.ftruncate(descriptor, self._sizes[is_success])
            raise
        for is_success, data in encoded.items():
            self._sizes[is_success] += len(data)
            for line in data.splitlines():
                self._count(line)

    def close(self) -> None:
        """Closes both files and removes the one that has no line."""
        while self._files:
            is_success, descriptor = self._files.popitem()
            os.close(descriptor)
            if not self._sizes[is_success]:
                self._paths[is_success].unlink(missing_ok=True)

    def has_lines(self, is_success: bool) -> bool:
        """Whether the output file (True) or the error file has a line."""
        return self._sizes[is_success] > 0

    def _recover(self, is_success: bool, path: Path) -> int:
        """Counts the lines of a file, and cuts off what a crash left of a last one. Returns its size."""
        size = 0
        for number, line in enumerate(_whole_lines(path), 1):
            try:
                self._count(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise DamagedResults(f"the results in {path.name!r} are damaged at line {number}: {error}") from None
            size += len(line)
        os.ftruncate(self._files[is_success], size)
        return size

    def _count(self, line: bytes) -> None:
        result = msgspec.json.decode(line, type=_ResultLine)
        self.done.add(digest(result.custom_id))
        response = result.response
        if response is None or response.status_code != 200:
            self.counts.failed += 1
            return
        self.counts.completed += 1
        if response.body.usage is not None:
            response.body.usage.add_to(self.tokens)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines that have their end."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
