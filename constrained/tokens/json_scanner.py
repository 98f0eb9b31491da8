"""Decides whether a partial text ends inside a JSON string.

The text is scanned from its start, because the marker that opens JSON may also occur inside a string:

    free text <c> {"a": "no <c> here 12   ends inside a string; the second <c> opens nothing
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*(?P<closed>"?)'
_SCALAR = rb"-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?|true|false|null"
_PART = re.compile(rb"(?P<string>%s)|(?P<open>[\[{])|(?P<shut>[\]}])|%s" % (_STRING, _SCALAR), re.DOTALL)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_SPACES = re.compile(rb"[ \t\r\n]*")


class JsonDelimiters(NamedTuple):
    """The markers before and after a JSON value in other text."""

    begin: bytes
    end: bytes


class JsonRegions(NamedTuple):
    """Where a text contains JSON: after each begin marker.

    Without `free_text`, a text that does not begin with a marker is JSON from its first byte. Without `delimiters` the
    whole text is JSON; with `is_unknown` it is not known where there is any.
    """

    delimiters: tuple[JsonDelimiters, ...] = ()
    free_text: bool = False
    is_unknown: bool = False


ALL_JSON = JsonRegions()


def ends_in_string(text: bytes, json_regions: JsonRegions = ALL_JSON) -> bool:
    """Returns whether `text` ends inside a string of its JSON, or after the JSON of a call.

    Free text before the first call counts as JSON: quotes open and close strings there.

    >>> ends_in_string(b'["1'), ends_in_string(b'["1", 1')
    (True, False)
    """
    if json_regions.is_unknown:
        return False
    at, is_first = 0, True
    places = [text.find(call.begin) for call in json_regions.delimiters]
    while True:
        opened = _next_opening(text, at, json_regions.delimiters, places)
        if opened is None or (is_first and opened[0] and not json_regions.free_text):
            return not is_first or _ESCAPE.sub(b"", text).count(b'"') % 2 == 1
        start, call = opened
        value = _value(text, start + len(call.begin))
        if value.end is None:
            return value.in_string
        at, is_first = _skip_end_tag(text, value.end, call.end), False


def _next_opening(
    text: bytes, at: int, delimiters: Sequence[JsonDelimiters], places: list[int]
) -> tuple[int, JsonDelimiters] | None:
    """Returns the first begin marker at or after `at`. `places` caches the last position of each (-1: none)."""
    for i, (call, place) in enumerate(zip(delimiters, places, strict=True)):
        if 0 <= place < at:  # a marker that does not occur is searched for once
            places[i] = text.find(call.begin, at)
    openings = [(place, call) for call, place in zip(delimiters, places, strict=True) if place >= 0]
    return min(openings, key=lambda opening: opening[0], default=None)


def _skip_end_tag(text: bytes, at: int, end: bytes) -> int:
    """Returns the position after the end marker, which white space may precede, if it is there; else `at`."""
    spaces = _SPACES.match(text, at)
    for place in (at, spaces.end() if spaces else at):
        if text.startswith(end, place):
            return place + len(end)
    return at


class _Value(NamedTuple):
    """Where a value ends; None if the text ends first, inside one of the value's strings or not."""

    end: int | None
    in_string: bool = False


def _value(text: bytes, start: int) -> _Value:
    """Scans the JSON value at `start`. A number at the end of the text counts as unfinished."""
    depth = 0
    for part in _PART.finditer(text, start):
        if part["string"] is not None and not part["closed"]:
            return _Value(None, in_string=True)
        depth += (part["open"] is not None) - (part["shut"] is not None)
        is_complete = part["string"] is not None or part["shut"] is not None or part.end() < len(text)
        if depth <= 0 and part["open"] is None and is_complete:
            return _Value(part.end())
    return _Value(None)
