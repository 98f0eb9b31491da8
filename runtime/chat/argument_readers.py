"""Reads the arguments of a call in every form incrementally, and returns them as one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from plait.constrained.specs import CDATA_BEGIN, CDATA_END, GrammarError, PythonForm
from plait.constrained.tool_arguments import parameter_kinds
from plait.runtime.chat.formats.call_format import (
    ArgumentsForm,
    ElementArguments,
    JsonArguments,
    NotationArguments,
    json_type,
)
from plait.runtime.tokenizer.json_text import json_text

ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
LARGE_SCHEMA_CHARS = 10_000  # finding the types of its parameters may take more than milliseconds
_STRING = frozenset(("string",))
_CONTAINERS = frozenset(("array", "object"))


class ReadArguments(NamedTuple):
    """json: what is certain of the object's text. rest: the text that was not read. is_done: the object is complete."""

    json: str
    rest: str
    is_done: bool


class ArgumentsReader(Protocol):
    """Reads the arguments of one call. `read` takes the text that it has not read yet, with what followed it."""

    def read(self, text: str) -> ReadArguments: ...


def arguments_reader(form: ArgumentsForm, schema: Mapping[str, Any], follower: str) -> ArgumentsReader:
    """Returns the reader of one call's arguments.

    schema: of the arguments; it tells which elements are strings. follower: the text behind the arguments.
    """
    if isinstance(form, JsonArguments):
        return JsonReader()
    if isinstance(form, ElementArguments):
        return ElementsReader(form, schema, follower)
    return NotationReader(form) if isinstance(form, NotationArguments) else KeywordsReader(follower)


def find_types(form: ArgumentsForm, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Finds what readers of this form need to know of large schemas, which may take long, and is kept."""
    if isinstance(form, ElementArguments) and not form.types:
        for text in map(json_text, schemas):
            if len(text) > LARGE_SCHEMA_CHARS:
                _parameter_types(text)


class JsonValueScanner:
    """Finds the end of one JSON value that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_scalar = False
        self._num_scanned = 0  # of a text that grows, and where the value ends in it
        self._end: int | None = None

    def find(self, text: str) -> int | None:
        """Returns how many characters of `text` belong to the value, or None if the value does not end in it."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        return index + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return index + 1
            elif char in ",)}] \n" and self._is_scalar and not self._depth:
                return index
            elif not self._depth:
                self._is_scalar = True
        return None

    def end_in(self, text: str) -> int | None:
        """As `find`, of a text that begins with the value and grows from call to call."""
        if self._end is None:
            end = self.find(text[self._num_scanned :])
            self._end = None if end is None else self._num_scanned + end
            self._num_scanned = len(text)
        return self._end


class JsonReader:
    """One JSON object, passed on as it is written.

    >>> JsonReader().read('{"a": 1}</call>')
    ReadArguments(json='{"a": 1}', rest='</call>', is_done=True)
    """

    def __init__(self) -> None:
        self._scanner = JsonValueScanner()

    def read(self, text: str) -> ReadArguments:
        """See ArgumentsReader."""
        end = self._scanner.find(text)
        return ReadArguments(text, "", False) if end is None else ReadArguments(text[:end], text[end:], True)


class ElementsReader:
    """One element for each argument. Strings are passed on as they arrive, other values when they are complete.

    >>> form = ElementArguments("<{name}>", "</p>")
    >>> ElementsReader(form, {"properties": {"s": {"type": "string"}}}, "</f>").read('<s>a"b</p><n>1</p></f>').json
    '{"s": "a\\\\"b", "n": 1}'
    """

    def __init__(self, form: ElementArguments, schema: Mapping[str, Any], follower: str) -> None:
        self._form, self._follower = form, follower
        self._types_by_name = {} if form.types else _parameter_types(json_text(schema))
        before, _, after = form.open.partition("{name}")
        self._before = before
        types = "|".join(re.escape(text) for text in sorted({text for _, text in form.types}, key=len, reverse=True))
        self._name_pattern = re.compile(
            "(.*?)" + re.escape(after).replace(re.escape("{type}"), f"({types})"), re.DOTALL
        )
        self._num_read = 0
        self._types: frozenset[str] | None = None  # that the open element may have
        self._is_open = False  # a string's JSON has been opened
        self._json_value = JsonValueScanner()

    def read(self, text: str) -> ReadArguments:
        """See ArgumentsReader."""
        pieces: list[str] = []
        while True:
            step = self._between(text) if self._types is None else self._value(text)
            if step is None:
                return ReadArguments("".join(pieces), text, False)
            piece, text = step.json, step.rest
            pieces.append(piece)
            if step.is_done:
                return ReadArguments("".join(pieces), text, True)

    def _between(self, text: str) -> ReadArguments | None:
        """Between two elements: the next one's opening mark, or the end. None if more text is needed."""
        opening = (self._form.separator if self._num_read else "") + self._before
        ends = [mark for mark in (opening, self._follower) if mark]
        if any(len(mark) > len(text) and mark.startswith(text) for mark in ends):
            return None
        if not text.startswith(opening) or (len(self._follower) > len(opening) and text.startswith(self._follower)):
            return ReadArguments("}" if self._num_read else "{}", text, True)
        match = self._name_pattern.match(text, len(opening))
        if match is None:
            return None
        self._types = self._types_of(match)
        beginning = f"{', ' if self._num_read else '{'}{json.dumps(match[1], ensure_ascii=False)}: "
        self._num_read += 1
        return ReadArguments(beginning, text[match.end() :], False)

    def _types_of(self, match: re.Match[str]) -> frozenset[str]:
        if self._form.types and match.lastindex == 2:
            return frozenset(name for name, text in self._form.types if text == match[2])
        named = self._types_by_name
        return named.get(match[1], named.get(None, ALL_TYPES))

    def _value(self, text: str) -> ReadArguments | None:
        """Within an element's value."""
        assert self._types is not None
        close = self._form.close
        start = 0
        if self._form.has_cdata and (text.startswith(CDATA_BEGIN) or CDATA_BEGIN.startswith(text)):
            return self._cdata_value(text)
        if self._types & _CONTAINERS and text[:1] in ("{", "["):  # JSON, whose strings may contain the closing mark
            json_end = self._json_value.end_in(text)
            if json_end is None:
                return None
            start = json_end
        end = text.find(close, start)
        if self._types == _STRING:
            piece, size, is_closed = _text_until(close, text)
            if not is_closed and not size:
                return None
            piece = ("" if self._is_open else '"') + piece + ('"' if is_closed else "")
            self._is_open = not is_closed
            if not is_closed:
                return ReadArguments(piece, text[size:], False)
        elif end < 0:
            return None
        else:
            piece = _json_of(text[:end], self._types, self._form.python)
        self._types, self._json_value = None, JsonValueScanner()
        return ReadArguments(piece, text[end + len(close) :], False)

    def _cdata_value(self, text: str) -> ReadArguments | None:
        """Within a value in a CDATA section."""
        assert self._types is not None
        value, closed, rest = text[len(CDATA_BEGIN) :].partition(CDATA_END + self._form.close)
        if not closed or not text.startswith(CDATA_BEGIN):
            return None
        piece = (
            json.dumps(value, ensure_ascii=False)
            if self._types == _STRING
            else _json_of(value, self._types, self._form.python)
        )
        self._types = None
        return ReadArguments(piece, rest, False)


class KeywordsReader:
    """Python's keyword arguments; each is passed on when it is complete.

    >>> KeywordsReader(")").read('a="x", b=[True])]')
    ReadArguments(json='{"a": "x", "b": [true]}', rest=')]', is_done=True)
    """

    _NAME = re.compile(r"(, )?([^=,)\s]+)=")

    def __init__(self, follower: str) -> None:
        self._follower = follower
        self._num_read = 0
        self._value = JsonValueScanner()

    def read(self, text: str) -> ReadArguments:
        """See ArgumentsReader."""
        pieces: list[str] = []
        while text:
            if text.startswith(self._follower):
                pieces.append("}" if self._num_read else "{}")
                return ReadArguments("".join(pieces), text, True)
            match = self._NAME.match(text)
            end = None if match is None else self._end_of_value(text[match.end() :])
            if match is None or end is None:
                break
            self._value = JsonValueScanner()
            value = text[match.end() : match.end() + end]
            if value[0] == "'":  # nothing in it is escaped
                value = json.dumps(value[1:-1], ensure_ascii=False)
            beginning = f"{', ' if self._num_read else '{'}{json.dumps(match[2], ensure_ascii=False)}: "
            pieces.append(beginning + _LITERAL.sub(_literal_as_json, value))
            self._num_read, text = self._num_read + 1, text[match.end() + end :]
        return ReadArguments("".join(pieces), text, False)

    def _end_of_value(self, text: str) -> int | None:
        """Returns the length of the value with which a text begins, or None if the text ends within it."""
        if text[:1] == "'":
            return text.find("'", 1) + 1 or None
        return self._value.end_in(text)


_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|True|False|None')
_PYTHON_SCALARS = {"True": "true", "False": "false", "None": "null"}


def _literal_as_json(match: re.Match[str]) -> str:
    return _PYTHON_SCALARS.get(match[0], match[0])


_BARE_NAME = re.compile(r"([^:]*):")
_BARE_SCALAR = re.compile(r"([^,}\]]+)(?=[,}\]])")
_BARE_LITERALS = {"None": "null", "none": "null", "True": "true", "False": "false"}


class NotationReader:
    """One object. Strings are passed on as they arrive, numbers and names when they are complete.

    >>> NotationReader(NotationArguments("'", "None")).read("{a:'x',b:[None,{}]}</call>")
    ReadArguments(json='{"a": "x", "b": [null, {}]}', rest='</call>', is_done=True)
    """

    def __init__(self, form: NotationArguments) -> None:
        self._form = form
        self._open: list[str] = []  # the brackets around what comes next
        self._in_string = False
        self._before_name = False

    def read(self, text: str) -> ReadArguments:
        """See ArgumentsReader."""
        pieces: list[str] = []
        while text and (step := self._in_text(text) if self._in_string else self._between(text)) is not None:
            piece, size = step
            pieces.append(piece)
            text = text[size:]
            if not self._open:
                return ReadArguments("".join(pieces), text, True)
        return ReadArguments("".join(pieces), text, False)

    def _in_text(self, text: str) -> tuple[str, int] | None:
        """Within a string: (the JSON of what is certain of it, its length); None if more text is needed."""
        piece, size, is_closed = _text_until(self._form.quote, text)
        if not is_closed and not size:
            return None
        self._in_string = not is_closed
        return (f'{piece}"', size + len(self._form.quote)) if is_closed else (piece, size)

    def _between(self, text: str) -> tuple[str, int] | None:
        """The same at a bracket, a separator, a name, a scalar or the beginning of a string."""
        first = text[0]
        if first in "]}":
            del self._open[-1:]
            self._before_name = False
            return first, 1
        if first == ",":
            self._before_name = self._open[-1:] == ["{"]
            return ", ", 1
        if self._before_name:
            name = _BARE_NAME.match(text)
            self._before_name = name is None
            return None if name is None else (f"{json.dumps(name[1], ensure_ascii=False)}: ", name.end())
        if first in "[{":
            self._open.append(first)
            self._before_name = first == "{"
            return first, 1
        if text.startswith(self._form.quote):
            self._in_string = True
            return '"', len(self._form.quote)
        scalar = None if self._form.quote.startswith(text) else _BARE_SCALAR.match(text)
        if scalar is None:
            return None
        value = "null" if scalar[1] == self._form.null else _BARE_LITERALS.get(scalar[1], scalar[1])
        return value, scalar.end()


def _text_until(mark: str, text: str) -> tuple[str, int, bool]:
    """Of a string that ends with `mark`: (its JSON within the quotes, its length, whether the mark is there)."""
    end = text.find(mark)
    size = end if end >= 0 else len(text) - partial_match_length(text, [mark])
    return json.dumps(text[:size], ensure_ascii=False)[1:-1], size, end >= 0


def _json_of(text: str, types: frozenset[str], python: PythonForm) -> str:
    """Returns the JSON of an element's value that is no plain string: JSON of one of its other types, or a string."""
    value = text.strip()
    if python and value in _PYTHON_SCALARS.values() and "string" in types:
        return json.dumps(text, ensure_ascii=False)  # Python writes it otherwise
    if python == "values" or "string" not in types:  # in either spelling where it is no text
        value = _LITERAL.sub(_literal_as_json, value)
    elif python:
        value = _PYTHON_SCALARS.get(value, value)
    try:
        value_type = json_type(json.loads(value))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)  # a string, or a value that was cut off
    if value_type == "integer" and "number" in types:
        return value
    if "string" in types and (value_type == "string" or value_type not in types):
        return json.dumps(text, ensure_ascii=False)
    return value


def _parameter_types(schema: str) -> Mapping[str | None, frozenset[str]]:
    """The types of each parameter's values, as the constraint on the elements sees them; None: of any other one.

    schema: as JSON text; what is found is kept for some schemas.
    """
    try:
        return parameter_kinds(schema)
    except GrammarError:  # no constraint holds these arguments
        return {None: ALL_TYPES}


def partial_match_length(text: str, markers: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that is a proper prefix of one of `markers`."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
