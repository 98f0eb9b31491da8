"""Reads and checks the lines of a batch's input file, and orders them so that shared prefixes are computed once.

A line is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`. Here only the line itself is checked; its
body is checked by the endpoint, when the line runs, and a wrong one gets an error line of its own. The lines are found
and checked once; an index on disk keeps their places and their order.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from plait.runtime.results.json_lines import READ_BYTES, LineSplitter, NumberedLine
from plait.runtime.server.batches.directory import open_stored, read_stored, run_to_end, write_record
from plait.runtime.server.batches.records import BatchProblem, Endpoint
from plait.runtime.server.batches.result_log import digest
from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.json_body import parse_steps

SORTED_AT_ONCE = 4000
ENVELOPE_BYTES = 1 << 12  # of a line beside its body
MAX_PROBLEMS = 100  # reported for one file
MAX_ID_CHARS = 512
FIELDS = ("custom_id", "method", "url", "body")
# What a prompt begins with comes first: lines are compared by these fields of their bodies, in this order.
PROMPT_FIELDS = ("model", "cache_salt", "tools", "instructions", "messages", "prompt", "input")
PREFIX_BYTES = (64, 256, 1024, 4096, 16_384, 65_536)  # prefixes of these lengths are compared
INDEX_ROW = struct.Struct(">IQI16s")  # a `Line`
RANK = struct.Struct(f">{len(PREFIX_BYTES)}I")


class Line(NamedTuple):
    """Where a line of the input is. `number`: from 1."""

    number: int
    offset: int
    size: int
    id_digest: bytes


class InputLine(msgspec.Struct):
    """A line that was checked."""

    custom_id: str
    body: msgspec.Raw


class InputChanged(Exception):
    """The file is not the one that was checked."""


@dataclass
class CheckedInput:
    """The lines of a file, in the order in which they should run, and what is wrong with the file."""

    lines: list[Line] = field(default_factory=list)
    problems: list[BatchProblem] = field(default_factory=list)


def read_line(path: Path, line: Line) -> InputLine:
    """Reads a line that was checked before. Raises InputChanged and OSError."""
    descriptor = open_stored(path)
    try:
        data = os.pread(descriptor, line.size, line.offset)
    finally:
        os.close(descriptor)
    try:
        read = msgspec.json.decode(data, type=InputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputChanged(f"line {line.number}: {error}") from None
    if digest(read.custom_id) != line.id_digest:
        raise InputChanged(f"line {line.number} has another custom_id")
    return read


def write_lines(path: Path, lines: list[Line]) -> None:
    """Writes the index of an input, its lines in their order, 32 bytes each. For a thread. Raises OSError."""
    write_record(path, b"".join(INDEX_ROW.pack(*line) for line in lines))


def read_lines(path: Path) -> list[Line]:
    """Reads an index. Raises InputChanged for a damaged one, and OSError."""
    try:
        return [Line(*row) for row in INDEX_ROW.iter_unpack(read_stored(path))]
    except struct.error:
        raise InputChanged(f"the index {path.name} is damaged") from None


async def check_input(path: Path, endpoint: Endpoint, max_body_bytes: int, max_lines: int) -> CheckedInput:
    """Checks all lines of a file, in steps of milliseconds. Raises OSError."""
    checked, groups = CheckedInput(), PrefixGroups()
    checker = _LineChecker(endpoint)
    ranks: list[bytes] = []  # shorter to compare than tuples
    async for number, offset, data in _lines(path, max_body_bytes + ENVELOPE_BYTES):
        if data is None:
            limit = max_body_bytes + ENVELOPE_BYTES
            problem = BatchProblem(code="line_too_long", message=f"the line is longer than {limit} bytes", line=number)
            checked.problems.append(problem)
        elif data.strip():
            value, problems = await checker.check(number, data)
            checked.problems += problems
            if not problems:
                checked.lines.append(Line(number, offset, len(data), digest(value["custom_id"])))
                ranks.append(RANK.pack(*groups.rank(number, value["body"])))
        if len(checked.lines) > max_lines:
            text = f"the file has more than {max_lines} lines"
            checked.problems = [BatchProblem(code="too_many_tasks", message=text)]
            return checked
        if len(checked.problems) >= MAX_PROBLEMS:
            checked.problems = checked.problems[:MAX_PROBLEMS]
            return checked
    if not checked.lines and not checked.problems:
        checked.problems.append(BatchProblem(code="empty_file", message="the file has no lines"))
    checked.lines = await _in_order_of(ranks, checked.lines)
    return checked


async def _in_order_of(ranks: list[bytes], lines: list[Line]) -> list[Line]:
    """Returns the lines sorted by their ranks, in steps of milliseconds."""
    runs, ordered = [], list[Line]()
    for first in range(0, len(lines), SORTED_AT_ONCE):
        runs.append(
            sorted(zip(ranks[first : first + SORTED_AT_ONCE], lines[first : first + SORTED_AT_ONCE], strict=True))
        )
        await asyncio.sleep(0)
    for _, line in heapq.merge(*runs):
        ordered.append(line)
        if not len(ordered) % 1000:
            await asyncio.sleep(0)
    return ordered


async def _lines(path: Path, max_bytes: int) -> AsyncIterator[NumberedLine]:
    splitter = LineSplitter(max_bytes)
    descriptor = open_stored(path)
    try:
        while piece := await run_to_end(os.read, descriptor, READ_BYTES):
            for line in splitter.feed(piece):
                yield line
        for line in splitter.end():
            yield line
    finally:
        os.close(descriptor)


class _LineChecker:
    """Checks the lines of one file, one after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._seen: set[bytes] = set()

    async def check(self, number: int, data: bytes) -> tuple[Any, list[BatchProblem]]:
        """Returns the decoded line and what is wrong with it."""
        decoded: list[Any] = []
        try:
            for _ in parse_steps(data, decoded):
                await asyncio.sleep(0)
        except ApiError as error:
            text = error.message.replace("the body", "the line")
            return None, [BatchProblem(code="invalid_json_line", message=text, line=number)]
        found = [(code, text, param) for code, text, param in self._problems(decoded[0])]
        return decoded[0], [BatchProblem(code=c, message=text, line=number, param=param) for c, text, param in found]

    def _problems(self, value: Any) -> list[tuple[str, str, str | None]]:
        """(code, message, param) of each problem of a decoded line."""
        if not isinstance(value, dict):
            return [("invalid_json_line", "the line must be a JSON object", None)]
        found: list[tuple[str, str, str | None]] = []
        for name in FIELDS:
            if value.get(name) is None:
                found.append(("missing_required_parameter", f"missing required parameter: '{name}'", name))
        for name in value.keys() - set(FIELDS):
            text = f"unknown parameter: '{name[:100]}'; a line has {', '.join(FIELDS)}"
            found.append(("unknown_parameter", text, name[:100]))
        if found:
            return found
        found += self._id_problems(value["custom_id"])
        if value["method"] != "POST":
            found.append(("invalid_method", "'method' must be POST", "method"))
        if value["url"] != self._endpoint:
            text = f"'url' must be that of the batch, {self._endpoint}, not {str(value['url'])[:100]!r}"
            found.append(("url_mismatch", text, "url"))
        if not isinstance(value["body"], dict):
            found.append(("invalid_value", "'body' must be an object", "body"))
        elif value["body"].get("stream"):
            found.append(("invalid_value", "'body.stream' must be false: a batch does not stream", "body.stream"))
        return found

    def _id_problems(self, custom_id: Any) -> list[tuple[str, str, str | None]]:
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
            text = f"'custom_id' must be a text of 1 to {MAX_ID_CHARS} characters"
            return [("invalid_value", text, "custom_id")]
        key = digest(custom_id)
        if key in self._seen:
            text = f"the 'custom_id' {custom_id[:100]!r} is that of an earlier line"
            return [("duplicate_custom_id", text, "custom_id")]
        self._seen.add(key)
        return []


class PrefixGroups:
    """Ranks lines so that those whose prompts begin alike come together, in the order of the first line of each group.

    Prompts are compared by their first 64 bytes, then by their first 256, and so on, which needs a few numbers per line
    instead of its text. With equal ranks lines keep their order.

    >>> groups = PrefixGroups()
    >>> ranks = [groups.rank(number, {"prompt": text * 50}) for number, text in enumerate(["ab", "xy", "ab"], 1)]
    >>> ranks[0][0] == ranks[2][0] == 1, ranks[1][0]
    (True, 2)
    """

    def __init__(self) -> None:
        self._first_lines: list[dict[bytes, int]] = [{} for _ in PREFIX_BYTES]

    def rank(self, number: int, body: dict[str, Any]) -> tuple[int, ...]:
        """Returns the sort key of a line, from 1: of each of its prefixes the first line that has it."""
        prompt = msgspec.json.encode([body.get(name) for name in PROMPT_FIELDS])
        rank = []
        for length, first_lines in zip(PREFIX_BYTES, self._first_lines, strict=True):
            key = hashlib.blake2b(prompt[:length], digest_size=12).digest()
            rank.append(first_lines.setdefault(key, number))
        return tuple(rank)
