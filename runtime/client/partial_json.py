"""Parses the beginning of a JSON text: what is there so far, and which parts of it are complete.

A number is complete when something follows it. Keys and words such as `true` are either complete or left out; a string
is as long as it is so far, without half an escape or half a character.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 200

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+)("?)')
_HALF_ESCAPE = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HALF_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?)?\Z")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass
class JsonPart:
    """A value in a text that may end early. `text[start:end]` is its part of the text.

    `kind`: object, array, string or scalar. `value`: the string or scalar. `members`: those of an object, by key;
    `items`: those of an array. The last one may be incomplete; a value that has not begun is left out.
    """

    kind: str
    start: int
    end: int
    is_complete: bool = False
    value: Any = None
    members: dict[str, JsonPart] = field(default_factory=dict)
    items: list[JsonPart] = field(default_factory=list)

    def data(self, cut_strings: bool = True) -> Any:
        """Returns plain data: dicts, lists, texts, numbers, bools and None.

        cut_strings: with the string that the end of the text cuts off, if it does.
        """
        if self.kind == "object":
            members = self.members.items()
            return {key: part.data(cut_strings) for key, part in members if cut_strings or not part.is_cut_string}
        if self.kind == "array":
            return [part.data(cut_strings) for part in self.items if cut_strings or not part.is_cut_string]
        return self.value

    @property
    def is_cut_string(self) -> bool:
        """Whether the text ends in this string."""
        return self.kind == "string" and not self.is_complete


def parse_partial_json(text: str, *, is_complete: bool = False) -> JsonPart | None:
    """Returns the value that `text` is or begins, or None if it has not begun. `is_complete`: no more text comes.

    Raises ValueError for a text that begins no JSON value.
    """
    parser = _Parser(text, is_complete)
    part, at = parser.value(parser.skip_space(0), 0)
    if part is not None and part.is_complete and parser.skip_space(at) < len(text):
        raise parser.error(at)
    return part


def partial_json(text: str) -> Any:
    """Returns the data in the beginning of a JSON text, such as a stream that goes on: dicts, lists, texts, numbers.

    Strings are as far as they are. A number, a key or a word that may go on is left out. None: nothing has begun.
    Raises ValueError for a text that begins no JSON value.

    >>> partial_json('{"name": "Ada Lov'), partial_json('{"name": "Ada", "born": 18'), partial_json('[1, 2')
    ({'name': 'Ada Lov'}, {'name': 'Ada'}, [1])
    """
    part = parse_partial_json(text)
    return None if part is None else part.data()


class _Parser:
    """A recursive descent over one text. Its methods return what is there and the position after it."""

    def __init__(self, text: str, is_complete: bool) -> None:
        self._text, self._is_complete = text, is_complete

    def error(self, at: int) -> ValueError:
        return ValueError(f"this is not JSON: {self._text[at : at + 40]!r} at character {at}")

    def skip_space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        assert found is not None
        return found.end()

    def value(self, at: int, depth: int) -> tuple[JsonPart | None, int]:
        if depth > MAX_DEPTH:
            raise ValueError(f"the JSON is nested deeper than {MAX_DEPTH}")
        if at == len(self._text):
            return None, at
        match self._text[at]:
            case "{":
                return self._container("object", "}", at, depth)
            case "[":
                return self._container("array", "]", at, depth)
            case '"':
                return self._string(at)
            case "t" | "f" | "n":
                return self._word(at)
        return self._number(at)

    def _container(self, kind: str, end: str, start: int, depth: int) -> tuple[JsonPart, int]:
        """An object or an array: `end` closes it. A member of an object has its key before it."""
        part = JsonPart(kind, start, len(self._text))
        at, is_first, key = self.skip_space(start + 1), True, None
        while at < len(self._text):
            if self._text[at] == end and is_first:
                return self._closed(part, at)
            if kind == "object":
                key, at = self._string(at)
                if not key.is_complete:
                    break
                at = self._after(at, ":")
            value, at = self.value(at, depth + 1)
            if value is None:
                break
            if key is None:
                part.items.append(value)
            else:
                part.members[key.value] = value
            if not value.is_complete:
                break
            at = self.skip_space(at)
            if self._text[at : at + 1] == end:
                return self._closed(part, at)
            at, is_first = self._after(at, ","), False
        return part, len(self._text)

    def _closed(self, part: JsonPart, at: int) -> tuple[JsonPart, int]:
        part.end, part.is_complete = at + 1, True
        return part, at + 1

    def _after(self, at: int, mark: str) -> int:
        """Returns the position of what follows `mark`, which is the next character unless the text ends."""
        at = self.skip_space(at)
        if at == len(self._text):
            return at
        if self._text[at] != mark:
            raise self.error(at)
        return self.skip_space(at + 1)

    def _string(self, at: int) -> tuple[JsonPart, int]:
        found = _STRING.match(self._text, at)
        if found is None:
            raise self.error(at)
        value = json.loads(f'"{found[1]}"')
        if found[2]:
            return JsonPart("string", at, found.end(), True, value), found.end()
        if _HALF_ESCAPE.match(self._text, found.end()) is None:
            raise self.error(found.end())
        if value and "\ud800" <= value[-1] <= "\udbff":  # the first half of a character
            value = value[:-1]
        return JsonPart("string", at, len(self._text), False, value), len(self._text)

    def _word(self, at: int) -> tuple[JsonPart | None, int]:
        for word, value in _WORDS.items():
            if self._text.startswith(word, at):
                return JsonPart("scalar", at, at + len(word), True, value), at + len(word)
            if word.startswith(self._text[at:]):
                return None, at
        raise self.error(at)

    def _number(self, at: int) -> tuple[JsonPart | None, int]:
        if not self._is_complete and _HALF_NUMBER.match(self._text, at) is not None:
            return None, at
        found = _NUMBER.match(self._text, at)
        if found is None:
            raise self.error(at)
        return JsonPart("scalar", at, found.end(), True, json.loads(found[0])), found.end()
