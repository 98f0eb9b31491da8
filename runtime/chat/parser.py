"""Parses a model's output incrementally into reasoning, text, and tool calls with their arguments.

One parser handles every `CallFormat`. Complete responses and streams are built from the same parts, so they cannot
differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from plait.runtime.chat.argument_readers import ArgumentsReader, arguments_reader, partial_match_length
from plait.runtime.chat.formats.call_format import CONTROL, CallFormat
from plait.runtime.chat.formats.control_marks import without_control_tokens
from plait.runtime.chat.formats.reasoning_format import MessageFormat, ReasoningFormat

_MAX_ID_CHARS = 64


class ParsedPart(NamedTuple):
    """A part of an answer.

    kind "call" begins tool call number `number` (from 0), whose name is `text`; "arguments" continues that call's JSON.
    call_id: the id that the model wrote for the call, or "".
    """

    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    number: int = 0
    call_id: str = ""


class OutputParser:
    """Parses one answer. It is a state machine; `_state` is the method that handles the buffer next.

    call_format, tools: how calls are written, and {name that may be called: schema of its arguments}. is_json: the
    answer is either calls or a JSON value, so an answer that does not begin with a call contains none. messages: how
    its messages begin; in_message: the prompt ends with the beginning of the first one.

    >>> parser = OutputParser(None, False, CallFormat("<c>{name} ", "</c>"), {"f": {}})
    >>> [part[:2] for text in ('Hi <', 'c>f {"a"', ':1}</c>') for part in parser.push(text)]
    [('text', 'Hi'), ('call', 'f'), ('arguments', '{"a"'), ('arguments', ':1}')]
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        starts_in_reasoning: bool,
        call_format: CallFormat | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        is_json: bool = False,
        messages: MessageFormat | None = None,
        in_message: bool = False,
    ) -> None:
        self._reasoning = reasoning
        is_whole = is_json or (call_format is not None and call_format.is_whole_answer)
        self._begins_with_call = is_whole and messages is None  # messages tell a call from JSON
        self._format = call_format if tools else None
        self._tools = dict(tools or {})
        if self._format is not None:
            self._first_heads = [_head_pattern(head, self._tools) for head in self._format.first_heads]
            self._next_heads = [_head_pattern(self._format.head, self._tools)]
            self._tail = _id_pattern(re.escape(self._format.tail))
        self._state = self._in_reasoning if starts_in_reasoning and reasoning else self._at_start
        self._buffer = ""  # text not emitted yet: it may be the beginning of a marker
        self._messages, self._in_prompt = messages, in_message
        if messages is not None and in_message:
            self._buffer, self._state = messages.begin, self._at_message
        self._pending_whitespace = ""  # emitted only if text follows
        self._reader: ArgumentsReader | None = None
        self._parts: list[ParsedPart] = []
        self._call_parts: list[ParsedPart] = []  # of a call whose id stands behind its arguments
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
        is_mark = self._messages is not None and CONTROL in rest  # cut off within the beginning of a message
        if rest and self._state in (self._at_start, self._in_text) and not is_mark:
            self._emit_text(rest)
        elif rest and self._state == self._in_reasoning:
            self._parts.append(ParsedPart("reasoning", rest))
        self._release_call("")
        parts, self._parts = self._parts, []
        return parts

    # -- states: each consumes from `_buffer` and returns whether the next state can continue with the rest --------

    def _at_start(self) -> bool:
        """The beginning of the answer, where reasoning may begin."""
        if self._reasoning is not None and self._reasoning.begin:
            begin, stripped = self._reasoning.begin, self._buffer.lstrip()
            if stripped.startswith(begin):
                self._buffer, self._state = stripped[len(begin) :], self._in_reasoning
                return True
            if begin.startswith(stripped):
                return False
        self._state = self._in_text
        return True

    def _at_message(self) -> bool:
        """At the beginning of a message: reasoning, text or a call."""
        assert self._messages is not None
        rest = self._buffer[len(self._messages.begin) :]
        heads = [(text, self._in_text) for text in self._messages.texts]
        if self._reasoning is not None:
            heads.append((self._reasoning.begin, self._in_reasoning))
        for head, state in heads:
            if rest.startswith(head):
                self._in_prompt = False
                self._buffer, self._state = rest[len(head) :], state
                return True
        if any(head.startswith(rest) for head, _ in heads):
            return False
        if self._format is not None:
            written = self._buffer if self._format.opener.startswith(self._messages.begin) else rest.lstrip()
            heads_of_calls = (head.partition("{id}")[0] for head in self._format.first_heads)
            starts = [head.replace("{name}", name) for head in heads_of_calls for name in self._tools]
            if any(written.startswith(start) or start.startswith(written) for start in starts):
                self._buffer, self._state = written, self._in_first_head
                return bool(written)
        if CONTROL not in self._messages.begin and not self._in_prompt:  # ordinary text that is no mark
            self._emit_text(self._messages.begin)
        self._in_prompt = False
        self._buffer, self._state = rest, self._in_text
        return bool(rest)

    def _in_reasoning(self) -> bool:
        """Reasoning, without what the template writes between it and its end."""
        assert self._reasoning is not None
        lead, end_mark = self._reasoning.lead, self._reasoning.end
        before, end, after = self._buffer.partition(end_mark)
        num_pending = 0 if end else partial_match_length(before, [lead + end_mark, end_mark])
        text = before.removesuffix(lead) if end else before[: len(before) - num_pending]
        if text:
            self._parts.append(ParsedPart("reasoning", without_control_tokens(text)))
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
        if self._format is not None and self._begins_with_call:
            starts = self._starts(self._format)
            if not self._buffer.startswith(starts):
                if any(start.startswith(self._buffer) for start in starts):
                    return False
                self._format = None
        opener = self._format.opener if self._format is not None else ""
        opener = self._messages.begin if self._messages is not None else opener
        index = self._buffer.find(opener) if opener else -1
        if index < 0:
            num_pending = partial_match_length(self._buffer, [opener])
            self._emit_text(self._buffer[: len(self._buffer) - num_pending])
            self._buffer = self._buffer[len(self._buffer) - num_pending :]
            return False
        self._emit_text(self._buffer[:index])
        self._buffer = self._buffer[index:]
        self._state = self._in_first_head if self._messages is None else self._at_message
        return True

    def _starts(self, call_format: CallFormat) -> tuple[str, ...]:
        """The texts with one of which a first call begins."""
        if "{id}" in call_format.head:
            return (call_format.opener,)
        return tuple(call_format.begin + call_format.call_head(name) for name in self._tools)

    def _in_first_head(self) -> bool:
        """Before the head of an answer's or a section's first call is complete."""
        return self._open_call(self._first_heads)

    def _in_next_head(self) -> bool:
        """Before the head of another call is complete."""
        return self._open_call(self._next_heads)

    def _open_call(self, heads: list[re.Pattern[str]]) -> bool:
        assert self._format is not None
        match = next(filter(None, (head.match(self._buffer) for head in heads)), None)
        if match is None:
            longest = max(map(len, self._format.first_heads)) + max(map(len, self._tools)) + _MAX_ID_CHARS
            if len(self._buffer) > longest:  # no call: its first character is text
                self._emit_text(self._buffer[:1])
                self._buffer, self._state = self._buffer[1:], self._in_text
                return True
            return False
        name, call_id = match["name"], match.groupdict().get("id") or ""
        self._buffer = self._buffer[match.end() :]
        is_clients = self._format.id_source == "client"
        self._add_to_call(ParsedPart("call", name, self.num_calls, call_id if is_clients else ""))
        self.num_calls += 1
        self._pending_whitespace = ""
        follower = self._format.tail.partition("{id}")[0] or self._format.separator or self._format.end
        self._reader = arguments_reader(self._format.arguments, self._tools[name], follower)
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        assert self._reader is not None
        json, self._buffer, is_done = self._reader.read(self._buffer)
        if json:
            self._add_to_call(ParsedPart("arguments", json, self.num_calls - 1))
        if is_done:
            self._state = self._in_tail
            return self._in_tail() if not self._buffer else True
        return False

    def _in_tail(self) -> bool:
        """Consumes the text that closes a call, which the constraint guarantees."""
        assert self._format is not None
        match = self._tail.match(self._buffer)
        if match is None:
            return False
        self._release_call(match.groupdict().get("id") or "")
        self._buffer = self._buffer[match.end() :]
        self._state = self._after_call if self._format.begin or self._format.end else self._in_text
        return True

    def _after_call(self) -> bool:
        """Behind a call of a list or section: another call, or the end."""
        assert self._format is not None
        end, more = self._format.end, self._format.separator + self._format.head_start
        if end and self._buffer.startswith(end) and not (len(more) > len(end) and self._buffer.startswith(more)):
            self._buffer, self._state = self._buffer[len(end) :], self._in_text
        elif self._buffer.startswith(more):
            self._buffer, self._state = self._buffer[len(self._format.separator) :], self._in_next_head
        elif end.startswith(self._buffer) or more.startswith(self._buffer):
            return False
        else:
            self._state = self._in_text
        return True

    # -- parts -----------------------------------------------------------------------------------------------------

    def _add_to_call(self, part: ParsedPart) -> None:
        """Emits a part of a call, or keeps it until the call's id is known."""
        assert self._format is not None
        is_late = self._format.id_source == "client" and "{id}" in self._format.tail
        (self._call_parts if is_late else self._parts).append(part)

    def _release_call(self, call_id: str) -> None:
        """Emits the parts of a call whose id was not known."""
        self._parts += [part._replace(call_id=call_id) if part.kind == "call" else part for part in self._call_parts]
        self._call_parts = []

    def _emit_text(self, text: str) -> None:
        """Emits text. Where calls may follow, trailing white space waits until more text follows."""
        text = without_control_tokens(text)
        if self._format is None:
            text, self._pending_whitespace = self._pending_whitespace + text, ""
            if text:
                self._parts.append(ParsedPart("text", text))
            return
        text = self._pending_whitespace + text
        visible = text.rstrip() if text.strip() else ""
        self._pending_whitespace = text[len(visible) :]
        if visible:
            self._parts.append(ParsedPart("text", visible))


def _head_pattern(head: str, names: Mapping[str, Any]) -> re.Pattern[str]:
    """Returns the pattern of a call's head, with the groups `name` and, if it has an id, `id`."""
    name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    first, *others = re.escape(head).split(re.escape("{name}"))
    if not others:
        return _id_pattern(first)
    after = "" if others[-1] else r"(?=[^A-Za-z0-9_.:-])"  # a longer name may follow
    return _id_pattern(f"{first}(?P<name>{name}){'(?P=name)'.join(others)}{after}")


def _id_pattern(pattern: str) -> re.Pattern[str]:
    first, *others = pattern.split(re.escape("{id}"))
    ids = f"(?P<id>[A-Za-z0-9_.:-]{{1,{_MAX_ID_CHARS}}})"
    return re.compile(first + (ids + "(?P=id)".join(others) if others else ""))
