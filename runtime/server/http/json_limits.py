"""Counts what is expensive in a JSON body before it is parsed, and refuses a body with too much of it.

The parser holds the interpreter's lock for as long as it runs, so a thread for it would not free the event loop. Its
time depends on these numbers much more than on the number of bytes. Strings are skipped. The body is scanned in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait.runtime.server.errors import invalid

MAX_CONTAINERS = 20_000  # arrays and objects
MAX_TEXTS = 100_000  # strings, the keys of objects included; one that is not ASCII takes a quarter of a microsecond
MAX_ELEMENTS = 500_000  # separators: about the values of all arrays and objects, such as token ids
MAX_HARD_NUMBERS = 30_000  # reading one may take a microsecond, and that of any other fraction takes 0.05
MAX_LONG_NUMBERS = 2_000  # their digits may take the parser 10 microseconds
PIECE_BYTES = 1 << 17  # scanned at once; half of them may be quotes, between which there are as many texts
_ANY_DIGIT = bytes(ord("0") if chr(code) in "123456789" else code for code in range(256))
_HARD = b"0" * 15 + b"."  # below, no number of 19 digits is halfway between two doubles, which is what takes long
_LONG_RUN = b"0" * 20
MAX_PLACES = 28  # digits and zeros of a number; beyond, the powers of ten that the parser keeps are not exact
_ONLY_DIGITS = bytes(code if chr(code) in "0123456789" else ord(" ") for code in range(256))
_EXPONENT = re.compile(rb"[0-9][eE][+-]?([0-9]{3})?")


class JsonScan:
    """The numbers of containers, keys, elements, quotes and expensive numbers of a JSON text that is fed in pieces.

    Exact for valid JSON. For another text they are right up to its first error, where the parser stops. A number that
    two pieces share may not count as expensive.

    >>> scan = JsonScan()
    >>> scan.feed(b'{"a": [1, 2, ",:[{"]}')
    >>> scan.num_containers, scan.num_keys, scan.num_elements
    (2, 1, 2)
    """

    def __init__(self) -> None:
        self.num_containers = self.num_keys = self.num_elements = self.num_quotes = 0
        self.num_hard_numbers = self.num_long_numbers = 0

    def feed(self, piece: bytes) -> None:
        """Adds the numbers of `piece`, which must not begin with an escaped character."""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
        texts = piece.split(b'"')
        outside = b'"'.join(texts[self.num_quotes % 2 :: 2])
        self.num_quotes += len(texts) - 1
        self.num_containers += outside.count(b"[") + outside.count(b"{")
        self.num_keys += outside.count(b":")
        self.num_elements += outside.count(b",")
        self._count_expensive_numbers(outside)

    def _count_expensive_numbers(self, outside: bytes) -> None:
        if b"e" in outside or b"E" in outside:  # true and false have one, too
            exponents = _EXPONENT.findall(outside)
            self.num_hard_numbers += len(exponents)
            self.num_long_numbers += sum(map(bool, exponents))
        self.num_hard_numbers += outside.translate(_ANY_DIGIT).count(_HARD)
        if _LONG_RUN in outside.translate(_ANY_DIGIT, b"."):
            runs = outside.translate(_ONLY_DIGITS, b".").split()
            self.num_long_numbers += sum(_is_long(run) for run in runs if len(run) >= len(_LONG_RUN))


def _is_long(digits: bytes) -> bool:
    """Whether a run has 20 digits behind zeros, or so many zeros that the parser's tables of powers are not exact."""
    return len(digits.lstrip(b"0")) >= len(_LONG_RUN) or len(digits) > MAX_PLACES


def scan_steps(body: bytes, scan: JsonScan, subject: str = "the body has") -> Iterator[None]:
    """Feeds a body to `scan`, one piece per step. Raises ApiError 400 with the limit that it exceeds."""
    start = 0
    while start < len(body):
        end = _piece_end(body, start)
        scan.feed(body[start:end])
        for count, limit, name in (
            (scan.num_containers, MAX_CONTAINERS, "arrays and objects"),
            (scan.num_quotes // 2, MAX_TEXTS, "texts"),
            (scan.num_elements, MAX_ELEMENTS, "elements"),
            (scan.num_hard_numbers, MAX_HARD_NUMBERS, "numbers with exponents, or fractions behind 15 digits"),
            (scan.num_long_numbers, MAX_LONG_NUMBERS, "numbers of 20 digits or more, or with exponents of three"),
        ):
            if count > limit:
                raise invalid(f"{subject} more than {limit} {name}", code="too_many_elements")
        start = end
        yield


def _piece_end(body: bytes, start: int) -> int:
    """The end of the piece that begins at `start`. It never lies between a backslash and the character it escapes."""
    end = start + PIECE_BYTES
    if end >= len(body):
        return len(body)
    piece = body[start:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end - num_backslashes % 2
