"""Reads and checks the lines of a batch's input file, and orders them so that shared prefixes are computed once.

A line is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`. Here only the line itself is checked; its
body is checked by the endpoint, when the line runs, and a wrong one gets an error line of its own. The lines are found
and checked once; an index on disk keeps their places and their order.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from plait.runtime.results.json_lines import READ_BYTES, LineSplitter, NumberedLine
from plait.runtime.server.batches.directory import open_stored, read_stored, run_to_end, write_record
from plait.runtime.server.batches.records import BatchFailed, BatchProblem, Endpoint, failure
from plait.runtime.server.batches.result_log import digest
from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.json_body import parse_steps

LINES_PER_STEP = 1000  # that are put in order
ENVELOPE_BYTES = 1 << 12  # of a line beside its body
MAX_PROBLEMS = 100  # reported for one file
MAX_ID_CHARS = 512
FIELDS = ("custom_id", "method", "url", "body")
# What a prompt begins with comes first: lines are compared by these fields of their bodies, in this order.
PROMPT_FIELDS = ("model", "cache_salt", "tools", "instructions", "messages", "prompt", "input")
PREFIX_BYTES = (64, 256, 1024, 4096, 16_384, 65_536)  # prefixes of these lengths are compared
Problem = tuple[str, str, str | None]  # code, message, param


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


def changed(reason: str) -> BatchFailed:
    """Returns the error of an input that is not the one that was checked."""
    return failure("input_changed", f"the input has changed since it was checked: {reason}")


def read_line(path: Path, line: Line) -> InputLine:
    """Reads a line that was checked before. Raises BatchFailed if it has changed, and OSError."""
    descriptor = open_stored(path)
    try:
        data = os.pread(descriptor, line.size, line.offset)
    finally:
        os.close(descriptor)
    try:
        read = msgspec.json.decode(data, type=InputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise changed(f"line {line.number}: {error}") from None
    if digest(read.custom_id) != line.id_digest:
        raise changed(f"line {line.number} has another custom_id")
    return read


def write_lines(path: Path, lines: list[Line]) -> None:
    """Writes the index of an input, its lines in their order. For a thread. Raises OSError."""
    write_record(path, msgspec.msgpack.encode(lines))


def read_lines(path: Path) -> list[Line]:
    """Reads an index. Raises BatchFailed for a damaged one, and OSError."""
    try:
        return msgspec.msgpack.decode(read_stored(path), type=list[Line])
    except msgspec.DecodeError:
        raise changed(f"the index {path.name} is damaged") from None


async def check_input(path: Path, endpoint: Endpoint, max_body_bytes: int, max_lines: int) -> list[Line]:
    """Checks all lines of a file, in steps of milliseconds. Returns them in the order in which they should run.

    Raises BatchFailed with what is wrong, and OSError.
    """
    groups, problems = PrefixGroups(), list[BatchProblem]()
    seen, limit = set[bytes](), max_body_bytes + ENVELOPE_BYTES
    async for number, offset, data in _lines(path, limit):
        if data is None:
            text = f"the line is longer than {limit} bytes"
            problems.append(BatchProblem(code="line_too_long", message=text, line=number))
        elif data.strip():
            value, found = await _decoded(data)
            found = found or _problems(value, endpoint, seen)
            problems += [BatchProblem(code=code, message=text, param=param, line=number) for code, text, param in found]
            if not found:
                key = digest(value["custom_id"])
                seen.add(key)
                groups.add(value["body"], Line(number, offset, len(data), key))
        if len(seen) > max_lines:
            raise failure("too_many_tasks", f"the file has more than {max_lines} lines")
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise BatchFailed(*problems[:MAX_PROBLEMS])
    if not seen:
        raise failure("empty_file", "the file has no lines")
    ordered = list[Line]()
    for line in groups.lines():
        ordered.append(line)
        if not len(ordered) % LINES_PER_STEP:
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


async def _decoded(data: bytes) -> tuple[Any, list[Problem]]:
    decoded: list[Any] = []
    try:
        for _ in parse_steps(data, decoded):
            await asyncio.sleep(0)
    except ApiError as error:
        return None, [("invalid_json_line", error.message.replace("the body", "the line"), None)]
    return decoded[0], []


def _problems(value: Any, endpoint: Endpoint, seen: Collection[bytes]) -> list[Problem]:
    """Returns what is wrong with a decoded line. seen: digests of the custom ids before it."""
    if not isinstance(value, dict):
        return [("invalid_json_line", "the line must be a JSON object", None)]
    found: list[Problem] = []
    for name in FIELDS:
        if value.get(name) is None:
            found.append(("missing_required_parameter", f"missing required parameter: '{name}'", name))
    for name in value.keys() - set(FIELDS):
        text = f"unknown parameter: '{name[:100]}'; a line has {', '.join(FIELDS)}"
        found.append(("unknown_parameter", text, name[:100]))
    if found:
        return found
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        found.append(("invalid_value", f"'custom_id' must be a text of 1 to {MAX_ID_CHARS} characters", "custom_id"))
    elif digest(custom_id) in seen:
        text = f"the 'custom_id' {custom_id[:100]!r} is that of an earlier line"
        found.append(("duplicate_custom_id", text, "custom_id"))
    if value["method"] != "POST":
        found.append(("invalid_method", "'method' must be POST", "method"))
    if value["url"] != endpoint:
        text = f"'url' must be that of the batch, {endpoint}, not {str(value['url'])[:100]!r}"
        found.append(("url_mismatch", text, "url"))
    if not isinstance(body, dict):
        found.append(("invalid_value", "'body' must be an object", "body"))
    elif body.get("stream"):
        found.append(("invalid_value", "'body.stream' must be false: a batch does not stream", "body.stream"))
    return found


class PrefixGroups:
    """Orders lines so that those whose prompts begin alike come together, in the order of the first line of each group.

    Prompts are compared by their first 64 bytes, then by their first 256, and so on: a tree with a level for each of
    these lengths, which needs a few digests per line instead of its text. Equal prompts keep the order of their lines.

    >>> groups = PrefixGroups()
    >>> for number, text in enumerate(["ab", "xy", "ab"], 1):
    ...     groups.add({"prompt": text * 50}, Line(number, 0, 0, b""))
    >>> [line.number for line in groups.lines()]
    [1, 3, 2]
    """

    def __init__(self) -> None:
        self._tree: dict[bytes, Any] = {}

    def add(self, body: dict[str, Any], line: Line) -> None:
        """Adds the next line, with its body."""
        prompt = msgspec.json.encode([body.get(name) for name in PROMPT_FIELDS])
        node = self._tree
        for length in PREFIX_BYTES:
            node = node.setdefault(hashlib.blake2b(prompt[:length], digest_size=12).digest(), {})
            if len(prompt) <= length:
                break
        node.setdefault(b"", []).append(line)

    def lines(self) -> Iterator[Line]:
        """Yields the lines in their order."""
        nodes = [iter(self._tree.values())]
        while nodes:
            node = next(nodes[-1], None)
            if isinstance(node, dict):
                nodes.append(iter(node.values()))
            elif node is None:
                nodes.pop()
            else:
                yield from node
