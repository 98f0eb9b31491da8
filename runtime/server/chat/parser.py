"""Parses a model's output incrementally into reasoning, text, and tool calls with their arguments.

One parser handles every format in `formats.py`. Complete responses and streams are built from the same parts, so they
cannot differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from plait.runtime.server.chat.formats import ReasoningFormat, ToolFormat


class ParsedPart(NamedTuple):
    """A part of an answer.

    kind "call" begins tool call number `number` (from 0), whose name is `text`; "arguments" continues that call's JSON.
    """

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    number: int = 0


class JsonValueScanner:
    """Finds the end of one JSON value that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_scalar = False

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
            elif char in ",}] \n" and self._is_scalar and not self._depth:
                return index
            elif not self._depth:
                self._is_scalar = True
        return None


class OutputParser:
    """Parses one answer. It is a state machine; `_state` is the method that handles the buffer next.

    tools: the tool format and the names that may be called. is_json: the answer is either calls or a JSON value, so an
    answer that does not begin with a call contains none.

    >>> parser = OutputParser(None, False, (ToolFormat("", "<c>", "</c>"), ["f"]))
    >>> [part for text in ('Hi <', 'c>{"name":"f","arguments":{"a"', ':1}}</c>') for part in parser.push(text)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [ParsedPart(kind='text', text='Hi', number=0), ParsedPart(kind='call', text='f', number=0),
     ParsedPart(kind='arguments', text='{"a"', number=0), ParsedPart(kind='arguments', text=':1}', number=0)]
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
        self._call_end = tools[0].end if tools else ""
        self._state = self._in_reasoning if starts_in_reasoning and reasoning else self._at_start
        self._buffer = ""  # text not emitted yet: it may be the beginning of a marker
        self._pending_whitespace = ""  # emitted only if text follows
        self._expected_end = ""  # what is still missing at the end of the current call
        self._json = JsonValueScanner()
        self._parts: list[ParsedPart] = []
        self.num_calls = 0

    def push(self, text: str) -> list[ParsedPart]:
        """Adds output and returns the parts that are certain."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    @property
    def is_within_arguments(self) -> bool:
        """Whether the last call's arguments are incomplete."""
        return self._state == self._in_arguments

    def finish(self) -> list[ParsedPart]:
        """Returns the last parts at the end of the answer. An incomplete marker is text."""
        rest, self._buffer = self._buffer, ""
        if rest and self._state in (self._at_start, self._in_text):
            self._emit_text(rest)
        elif rest and self._state == self._in_reasoning:
            self._parts.append(ParsedPart("reasoning", rest))
        parts, self._parts = self._parts, []
        return parts

    # -- states: each consumes from `_buffer` and returns whether the next state can continue with the rest --------

    def _at_start(self) -> bool:
        """The beginning of the answer, where reasoning may begin."""
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
        before, end, after = self._buffer.partition(self._reasoning.end)
        num_pending = 0 if end else _partial_match_length(before, [self._reasoning.end])
        if len(before) > num_pending:
            self._parts.append(ParsedPart("reasoning", before[: len(before) - num_pending]))
        self._buffer = after if end else before[len(before) - num_pending :]
        if end:
            self._state = self._after_reasoning
        return bool(end)

    def _after_reasoning(self) -> bool:
        """Drops the white space between reasoning and text."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._in_text
        return bool(self._buffer)

    def _in_text(self) -> bool:
        if self._is_json and self._call_openers and not self._may_be_call():
            self._call_openers = {}
        matches = [(index, opener) for opener in self._call_openers if (index := self._buffer.find(opener)) >= 0]
        if not matches:
            num_pending = _partial_match_length(self._buffer, self._call_openers)
            self._emit_text(self._buffer[: len(self._buffer) - num_pending])
            self._buffer = self._buffer[len(self._buffer) - num_pending :]
            return False
        index, opener = min(matches)
        self._emit_text(self._buffer[:index])
        self._buffer = self._buffer[index + len(opener) :]
        name = self._call_openers[opener]
        if name is None:
            self._state = self._in_call_header
        else:
            self._open_call(name, self._call_end)
        return True

    def _may_be_call(self) -> bool:
        """Whether the buffer may begin with a call."""
        return any(self._buffer.startswith(opener) or opener.startswith(self._buffer) for opener in self._call_openers)

    def _in_call_header(self) -> bool:
        """Before `{"name": "...", "arguments": ` is complete."""
        assert self._call_header_pattern is not None
        match = self._call_header_pattern.match(self._buffer)
        if match is None:
            return False
        self._buffer = self._buffer[match.end() :]
        self._open_call(json.loads(match[1]), "}" + self._call_end)
        return True

    def _open_call(self, name: str, expected_end: str) -> None:
        self._parts.append(ParsedPart("call", name, self.num_calls))
        self.num_calls += 1
        self._pending_whitespace, self._expected_end = "", expected_end
        self._json, self._state = JsonValueScanner(), self._in_arguments

    def _in_arguments(self) -> bool:
        end = self._json.find(self._buffer)
        arguments, self._buffer = (self._buffer, "") if end is None else (self._buffer[:end], self._buffer[end:])
        if arguments:
            self._parts.append(ParsedPart("arguments", arguments, self.num_calls - 1))
        if end is not None:
            self._state = self._in_call_end
        return end is not None

    def _in_call_end(self) -> bool:
        """Consumes the text that closes a call, which the constraint guarantees."""
        while self._buffer and self._expected_end:
            if self._buffer[0] == self._expected_end[0]:
                self._expected_end = self._expected_end[1:]
            self._buffer = self._buffer[1:]
        if not self._expected_end:
            self._state = self._in_text
        return not self._expected_end

    def _emit_text(self, text: str) -> None:
        """Emits text. Where calls may follow, trailing white space waits until more text follows."""
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
    """Returns the pattern of a call's JSON object up to its arguments; group 1 is the name as a JSON string."""
    name, arguments = re.escape(json.dumps(call_format.name_key)), re.escape(json.dumps(call_format.arguments_key))
    return re.compile(rf'\s*\{{\s*{name}\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*{arguments}\s*:\s*(?=\S)')


def _partial_match_length(text: str, markers: Iterable[str]) -> int:
    """Returns the length of the longest end of `text` that is a proper prefix of one of `markers`."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
