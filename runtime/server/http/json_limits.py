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
MAX_FRACTIONS = 30_000  # numbers with a fraction or an exponent; reading one takes up to half a microsecond
MAX_LONG_NUMBERS = 2_000  # of these and of integers; their digits may take the parser 10 microseconds
PIECE_BYTES = 1 << 17  # scanned at once; half of them may be quotes, between which there are as many texts
_ANY_DIGIT = bytes(ord("0") if chr(code) in "123456789" else code for code in range(256))
_LONG_RUN = b"0" * 20
_LONG = re.compile(rb"[0-9]{20,}+")
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
        self.num_fractions = self.num_long_numbers = 0

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
        self.num_fractions += outside.count(b".")
        if b"e" in outside or b"E" in outside:  # true and false have one, too
            exponents = _EXPONENT.findall(outside)
            self.num_fractions += len(exponents)
            self.num_long_numbers += sum(map(bool, exponents))
        if _LONG_RUN in outside.translate(_ANY_DIGIT):
            self.num_long_numbers += len(_LONG.findall(outside))


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
            (scan.num_fractions, MAX_FRACTIONS, "fractions or exponents of numbers"),
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
