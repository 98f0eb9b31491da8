"""JSON lines of batches. Each line of an input is found and read by itself, so that a bad one spoils no other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

READ_BYTES = 1 << 18  # a good size of the pieces
NumberedLine = tuple[int, int, bytes | None]
"""(number, offset, line without its end). The number is from 1. None: the line is longer than it may be."""


class LineSplitter:
    """Splits bytes that come in pieces into lines. A line longer than `max_bytes` is not kept.

    >>> splitter = LineSplitter(max_bytes=3)
    >>> [*splitter.feed(b"ab\\nabc"), *splitter.feed(b"d\\n\\nx"), *splitter.end()]
    [(1, 0, b'ab'), (2, 3, None), (3, 8, b''), (4, 9, b'x')]
    """

    def __init__(self, max_bytes: float = math.inf) -> None:
        self._max_bytes = max_bytes
        self._number, self._offset, self._size = 1, 0, 0  # of the line that has begun
        self._line = bytearray()

    def feed(self, piece: bytes) -> Iterator[NumberedLine]:
        """Yields the lines that end in this piece."""
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._add(end)
            yield self._take()
        self._add(rest)

    def end(self) -> Iterator[NumberedLine]:
        """Yields a last line without an end."""
        if self._size:
            yield self._take()

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._max_bytes:
            self._line += part
        else:
            self._line.clear()

    def _take(self) -> NumberedLine:
        line = None if self._size > self._max_bytes else bytes(self._line)
        taken = self._number, self._offset, line
        self._number, self._offset, self._size = self._number + 1, self._offset + self._size + 1, 0
        self._line.clear()
        return taken


def parse_json_line(line: bytes) -> Any:
    """Returns the value of a line. Raises ValueError, with a reason on one line, for anything that is not JSON.

    NaN and Infinity, which Python's parser accepts, are not JSON, and a number beyond a float's range becomes one.

    >>> parse_json_line(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def encode_json_line(value: Any) -> bytes:
    """Returns a value as a line with its end. Halves of surrogate pairs are escaped. Raises ValueError for NaN.

    >>> encode_json_line({"a": "ü"}).decode()
    '{"a": "ü"}\\n'
    """
    return (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return number
