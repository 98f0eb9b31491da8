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

from plait.runtime.server.formats import ReasoningFormat, ToolFormat


class Part(NamedTuple):
    """A part of an answer. "call": call number `number` begins, `text` is its name. "arguments": more of its JSON."""

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    number: int = 0


class JsonEnd:
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


class Reader:
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
        self._begins = tools[0].begins(tools[1]) if tools else {}
        self._head = _head(tools[0]) if tools else None
        self._end = tools[0].end if tools else ""
        self._state = self._think if starts_in_reasoning and reasoning else self._start
        self._held = ""  # not yet given out: it may be the beginning of something
        self._space = ""  # white space that is only given out if text follows
        self._tail = ""  # what must still come before a call is closed
        self._json = JsonEnd()
        self._parts: list[Part] = []
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        self._held += text
        while self._held and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    @property
    def is_within_arguments(self) -> bool:
        """Whether the last call's arguments have not come to their end."""
        return self._state == self._arguments

    def finish(self) -> list[Part]:
        """What was held back at the end of the answer: a beginning that nothing followed is text."""
        held, self._held = self._held, ""
        if held and self._state in (self._start, self._text):
            self._say(held)
        elif held and self._state == self._think:
            self._parts.append(Part("reasoning", held))
        parts, self._parts = self._parts, []
        return parts

    # -- states: each takes from `_held`, and says whether to look again -----------------------------

    def _start(self) -> bool:
        """Nothing was said yet: reasoning may begin."""
        if self._reasoning is not None:
            begin, stripped = self._reasoning.begin, self._held.lstrip()
            if stripped.startswith(begin):
                self._held, self._state = stripped[len(begin) :], self._think
                return True
            if begin.startswith(stripped):
                return False
        self._state = self._text
        return True

    def _think(self) -> bool:
        assert self._reasoning is not None
        before, found, after = self._held.partition(self._reasoning.end)
        keep = 0 if found else _overlap(before, [self._reasoning.end])
        if len(before) > keep:
            self._parts.append(Part("reasoning", before[: len(before) - keep]))
        self._held = after if found else before[len(before) - keep :]
        if found:
            self._state = self._after_thought
        return bool(found)

    def _after_thought(self) -> bool:
        """Line breaks between reasoning and answer are nobody's."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._text
        return bool(self._held)

    def _text(self) -> bool:
        if self._is_json and self._begins and not self._may_be_call():
            self._begins = {}
        places = [(at, begin) for begin in self._begins if (at := self._held.find(begin)) >= 0]
        if not places:
            keep = _overlap(self._held, self._begins)
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, begin = min(places)
        self._say(self._held[:at])
        self._held = self._held[at + len(begin) :]
        name = self._begins[begin]
        if name is None:
            self._state = self._call_head
        else:
            self._open_call(name, self._end)
        return True

    def _may_be_call(self) -> bool:
        """Whether the text from here on may begin with a call."""
        return any(self._held.startswith(begin) or begin.startswith(self._held) for begin in self._begins)

    def _call_head(self) -> bool:
        """`{"name":"...","arguments":`"""
        assert self._head is not None
        match = self._head.match(self._held)
        if match is None:
            return False
        self._held = self._held[match.end() :]
        self._open_call(json.loads(match[1]), "}" + self._end)
        return True

    def _open_call(self, name: str, tail: str) -> None:
        self._parts.append(Part("call", name, self.num_calls))
        self.num_calls += 1
        self._space, self._tail, self._json, self._state = "", tail, JsonEnd(), self._arguments

    def _arguments(self) -> bool:
        end = self._json.find(self._held)
        taken, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if taken:
            self._parts.append(Part("arguments", taken, self.num_calls - 1))
        if end is not None:
            self._state = self._call_tail
        return end is not None

    def _call_tail(self) -> bool:
        """The letters that close a call, which the constraint makes certain."""
        while self._held and self._tail:
            if self._held[0] == self._tail[0]:
                self._tail = self._tail[1:]
            self._held = self._held[1:]
        if not self._tail:
            self._state = self._text
        return not self._tail

    def _say(self, text: str) -> None:
        """Text for the reader; where calls may come, white space waits until text follows it."""
        if not self._begins:
            if text:
                self._parts.append(Part("text", text))
            return
        text = self._space + text
        visible = text.rstrip() if text.strip() else ""
        self._space = text[len(visible) :]
        if visible:
            self._parts.append(Part("text", visible))


def _head(style: ToolFormat) -> re.Pattern[str]:
    name, arguments = re.escape(json.dumps(style.name_key)), re.escape(json.dumps(style.arguments_key))
    return re.compile(rf'\s*\{{\s*{name}\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*{arguments}\s*:\s*(?=\S)')


def _overlap(text: str, begins: Sequence[str] | dict[str, str | None]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `begins`."""
    longest = 0
    for begin in begins:
        for size in range(min(len(begin) - 1, len(text)), longest, -1):
            if text.endswith(begin[:size]):
                longest = size
                break
    return longest
