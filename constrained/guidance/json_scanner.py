"""Whether a text that is being written ends inside a JSON string: read from its beginning, since what opens JSON may
stand in a string as well.

    free text <c> {"a": "no <c> here 12   the end is in a string, and the second <c> opens nothing

Knows: how JSON writes values. Must not know: grammars, tokens.
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
    """What stands before a JSON value in other text, and what behind it."""

    begin: bytes
    end: bytes


class JsonRegions(NamedTuple):
    """Where a text has JSON: behind each begin; or, where nothing else may stand in it (not `free_text`) and it does
    not begin with one, from its first byte on. With no `delimiters` all of it is JSON."""

    delimiters: tuple[JsonDelimiters, ...] = ()
    free_text: bool = False


ALL_JSON = JsonRegions()


def ends_in_string(text: bytes, json_regions: JsonRegions = ALL_JSON) -> bool:
    """Whether `text` ends in a string of its JSON, or behind the JSON of a call, where no number is JSON's.

    Free text before the first call counts as JSON: there, quotes open and close.

    >>> ends_in_string(b'["1', Calls()), ends_in_string(b'["1", 1', Calls())
    (True, False)
    """
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
    """Where the first begin from `at` on is, and whose. `places`: where each was when last looked for; -1: nowhere."""
    for i, (call, place) in enumerate(zip(delimiters, places, strict=True)):
        if 0 <= place < at:  # only then, so that kinds which are not there cost one look
            places[i] = text.find(call.begin, at)
    found = [(place, call) for call, place in zip(delimiters, places, strict=True) if place >= 0]
    return min(found, key=lambda each: each[0], default=None)


def _skip_end_tag(text: bytes, at: int, end: bytes) -> int:
    """Behind a call's end, which white space may stand before, if it is there; else `at`."""
    spaces = _SPACES.match(text, at)
    for place in (at, spaces.end() if spaces else at):
        if text.startswith(end, place):
            return place + len(end)
    return at


class _Value(NamedTuple):
    """Where a value ends, None where the text does before it, in one of its strings or not."""

    end: int | None
    in_string: bool = False


def _value(text: bytes, start: int) -> _Value:
    """The JSON value from `start` on. A number at the end of the text may go on."""
    depth = 0
    for part in _PART.finditer(text, start):
        if part["string"] is not None and not part["closed"]:
            return _Value(None, in_string=True)
        depth += (part["open"] is not None) - (part["shut"] is not None)
        is_whole = part["string"] is not None or part["shut"] is not None or part.end() < len(text)
        if depth <= 0 and part["open"] is None and is_whole:
            return _Value(part.end())
    return _Value(None)
