"""What a model writes, taken apart while it comes: reasoning, text, tool calls and their arguments.

One parser for every row of the tables in `formats.py`. A whole answer is the sum of its stream's parts: both are made
here, so they cannot differ.

Knows: texts that open and close things. Must not know: tokens, protocols.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from plait.runtime.server.chat.formats import ReasoningFormat, ToolFormat


class ParsedPart(NamedTuple):
    """A part of an answer. "call": call number `number` begins, `text` is its name. "arguments": more of its JSON."""

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    number: int = 0


class JsonValueScanner:
    """Finds where one JSON value ends, fed piece by piece."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_scalar = False

    def find(self, text: str) -> int | None:
        """How many characters of `text` belong to the value, if it ends within; None when it goes on."""
        for at, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
                    if not self._depth:
                        return at + 1
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return at + 1
            elif letter in ",}] \n" and self._is_scalar and not self._depth:
                return at
            elif not self._depth:
                self._is_scalar = True
        return None


class OutputParser:
    """One answer's. `tools`: the format and the names of the tools that may be called. `is_json`: the answer is calls
    or a JSON value, so that what does not begin with a call holds none.

    >>> reader = Reader(None, False, (ToolFormat("", "<c>", "</c>"), ["f"]))
    >>> [p for piece in ('Hi <', 'c>{"name":"f","arguments":{"a"', ':1}}</c>') for p in reader.push(piece)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [Part(kind='text', text='Hi ', number=0), Part(kind='call', text='f', number=0),
     Part(kind='arguments', text='{"a"', number=0), Part(kind='arguments', text=':1}', number=0)]
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        starts_in_reasoning: bool,
        tools: tuple[ToolFormat, Sequence[str]] | None = None,
        is_json: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._is_json = is_json
        self._call_openers = tools[0].call_openers(tools[1]) if tools else {}
        self._call_header_pattern = _call_header_pattern(tools[0]) if tools else None
        self._end = tools[0].end if tools else ""
        self._state = self._in_reasoning if starts_in_reasoning and reasoning else self._at_start
        self._buffer = ""  # not yet given out: it may be the beginning of something
        self._pending_whitespace = ""  # white space that is only given out if text follows
        self._expected_end = ""  # what must still come before a call is closed
        self._json = JsonValueScanner()
        self._parts: list[ParsedPart] = []
        self.num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """The parts that are certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    @property
    def is_within_arguments(self) -> bool:
        """Whether the last call's arguments have not come to their end."""
        return self._state == self._in_arguments

    def finish(self) -> list[ParsedPart]:
        """What was held back at the end of the answer: a beginning that nothing followed is text."""
        held, self._buffer = self._buffer, ""
        if held and self._state in (self._at_start, self._in_text):
            self._emit_text(held)
        elif held and self._state == self._in_reasoning:
            self._parts.append(ParsedPart("reasoning", held))
        parts, self._parts = self._parts, []
        return parts

    # -- states: each takes from `_buffer`, and says whether to look again -----------------------------

    def _at_start(self) -> bool:
        """Nothing was said yet: reasoning may begin."""
        if self._reasoning is not None:
            begin, stripped = self._reasoning.begin, self._buffer.lstrip()
            if stripped.startswith(begin):
                self._buffer, self._state = stripped[len(begin) :], self._in_reasoning
                return True
            if begin.startswith(stripped):
                return False
        self._state = self._in_text
        return True

    def _in_reasoning(self) -> bool:
        assert self._reasoning is not None
        before, found, after = self._buffer.partition(self._reasoning.end)
        keep = 0 if found else _partial_match_length(before, [self._reasoning.end])
        if len(before) > keep:
            self._parts.append(ParsedPart("reasoning", before[: len(before) - keep]))
        self._buffer = after if found else before[len(before) - keep :]
        if found:
            self._state = self._after_reasoning
        return bool(found)

    def _after_reasoning(self) -> bool:
        """Line breaks between reasoning and answer are nobody's."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._in_text
        return bool(self._buffer)

    def _in_text(self) -> bool:
        if self._is_json and self._call_openers and not self._may_be_call():
            self._call_openers = {}
        places = [(at, begin) for begin in self._call_openers if (at := self._buffer.find(begin)) >= 0]
        if not places:
            keep = _partial_match_length(self._buffer, self._call_openers)
            self._emit_text(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        at, begin = min(places)
        self._emit_text(self._buffer[:at])
        self._buffer = self._buffer[at + len(begin) :]
        name = self._call_openers[begin]
        if name is None:
            self._state = self._in_call_header
        else:
            self._open_call(name, self._end)
        return True

    def _may_be_call(self) -> bool:
        """Whether the text from here on may begin with a call."""
        return any(self._buffer.startswith(begin) or begin.startswith(self._buffer) for begin in self._call_openers)

    def _in_call_header(self) -> bool:
        """`{"name":"...","arguments":`"""
        assert self._call_header_pattern is not None
        match = self._call_header_pattern.match(self._buffer)
        if match is None:
            return False
        self._buffer = self._buffer[match.end() :]
        self._open_call(json.loads(match[1]), "}" + self._end)
        return True

    def _open_call(self, name: str, tail: str) -> None:
        self._parts.append(ParsedPart("call", name, self.num_calls))
        self.num_calls += 1
        self._pending_whitespace, self._expected_end, self._json, self._state = (
            "",
            tail,
            JsonValueScanner(),
            self._in_arguments,
        )

    def _in_arguments(self) -> bool:
        end = self._json.find(self._buffer)
        taken, self._buffer = (self._buffer, "") if end is None else (self._buffer[:end], self._buffer[end:])
        if taken:
            self._parts.append(ParsedPart("arguments", taken, self.num_calls - 1))
        if end is not None:
            self._state = self._in_call_end
        return end is not None

    def _in_call_end(self) -> bool:
        """The letters that close a call, which the constraint makes certain."""
        while self._buffer and self._expected_end:
            if self._buffer[0] == self._expected_end[0]:
                self._expected_end = self._expected_end[1:]
            self._buffer = self._buffer[1:]
        if not self._expected_end:
            self._state = self._in_text
        return not self._expected_end

    def _emit_text(self, text: str) -> None:
        """Text for the reader; where calls may come, white space waits until text follows it."""
        if not self._call_openers:
            if text:
                self._parts.append(ParsedPart("text", text))
            return
        text = self._pending_whitespace + text
        visible = text.rstrip() if text.strip() else ""
        self._pending_whitespace = text[len(visible) :]
        if visible:
            self._parts.append(ParsedPart("text", visible))


def _call_header_pattern(call_format: ToolFormat) -> re.Pattern[str]:
    name, arguments = re.escape(json.dumps(call_format.name_key)), re.escape(json.dumps(call_format.arguments_key))
    return re.compile(rf'\s*\{{\s*{name}\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*{arguments}\s*:\s*(?=\S)')


def _partial_match_length(text: str, call_openers: Sequence[str] | dict[str, str | None]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `call_openers`."""
    longest = 0
    for begin in call_openers:
        for size in range(min(len(begin) - 1, len(text)), longest, -1):
            if text.endswith(begin[:size]):
                longest = size
                break
    return longest
