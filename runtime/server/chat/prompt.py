"""Renders a conversation with the model's chat template, such that client text never becomes a control token.

Before rendering, a placeholder replaces every control token in a client's texts, and every part of one at a text's
edge; after rendering, the placeholders become plain text again. So the template may trim and compare the texts, and
only the template's own text contains control tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from plait.runtime.errors import InputError
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.formats import ToolFormat, tool_as_json, tool_instructions
from plait.runtime.server.http.json_limits import JsonScan, scan_steps
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.literal_pattern import find_in_pieces, literal_pattern

PromptParts = list[tuple[str, bool]]  # (text, whether it is the template's own text and may hold control tokens)


class ControlTokenEscaper:
    """Replaces control tokens in texts by placeholders, and restores them as plain text.

    `added_texts`: the texts of the tokenizer's added tokens, which include all control tokens.
    """

    def __init__(self, added_texts: frozenset[str]) -> None:
        self._control_token_pattern = _control_token_pattern(added_texts)
        self._nonce = secrets.token_hex(8)
        self._escaped_texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self.end_marker = f"Qz{self._nonce}endzQ"

    def escape(self, value: Any) -> Any:
        """Returns a string, or all strings within JSON, with control tokens replaced."""
        if isinstance(value, str):
            pattern = self._control_token_pattern
            return value if pattern is None else self._escape_text(value, pattern)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def _escape_text(self, text: str, search: _ControlTokenPattern) -> str:
        """Replaces whole tokens, then a token's beginning at the end of `text`, then a token's end at its start."""
        parts, end = [], 0
        for match in find_in_pieces(search.pattern, text, search.max_length):
            parts += [text[end : match.start()], self._placeholder(match[0])]
            end = match.end()
        if parts:
            text = "".join([*parts, text[end:]])
        if not search.first_chars.isdisjoint(text[-search.max_length :]):
            for size in range(min(search.max_length, len(text)), 0, -1):
                if text[-size:] in search.prefixes:
                    text = text[:-size] + self._placeholder(text[-size:])
                    break
        if not search.last_chars.isdisjoint(text[: search.max_length]):
            for size in range(min(search.max_length, len(text)), 0, -1):
                if text[:size] in search.suffixes:
                    return self._placeholder(text[:size]) + text[size:]
        return text

    def _placeholder(self, text: str) -> str:
        self._numbers[str(len(self._escaped_texts))] = len(self._escaped_texts)
        self._escaped_texts.append(text)
        return f"Qz{self._nonce}n{len(self._escaped_texts) - 1}zQ"

    def restore(self, rendered: str) -> PromptParts:
        """Splits a rendered prompt into the template's text and the restored texts."""
        marker = f"Qz{self._nonce}n"
        first, *pieces = rendered.split(marker)
        parts = [(first, True)]
        for piece in pieces:
            number, end, rest = piece.partition("zQ")
            if end and number in self._numbers:
                parts += [(self._escaped_texts[self._numbers[number]], False), (rest, True)]
            else:  # the template has cut the placeholder
                parts.append((marker + piece, True))
        return [part for part in parts if part[0]]


class _ControlTokenPattern(NamedTuple):
    """A pattern of all control tokens, and their proper prefixes and suffixes, which the template could complete."""

    pattern: re.Pattern[str]
    prefixes: frozenset[str]
    suffixes: frozenset[str]
    first_chars: frozenset[str]
    last_chars: frozenset[str]
    max_length: int


@lru_cache(maxsize=8)
def _control_token_pattern(added_texts: frozenset[str]) -> _ControlTokenPattern | None:
    pattern = literal_pattern(added_texts)
    if pattern is None:
        return None
    prefixes = frozenset(text[:size] for text in added_texts for size in range(1, len(text)))
    suffixes = frozenset(text[size:] for text in added_texts for size in range(1, len(text)))
    edge_chars = frozenset(text[0] for text in added_texts), frozenset(text[-1] for text in added_texts)
    return _ControlTokenPattern(pattern, prefixes, suffixes, *edge_chars, max(map(len, added_texts)))


def render_chat(
    template: ChatTemplate, added_texts: frozenset[str], conversation: Conversation, call_format: ToolFormat
) -> PromptParts:
    """Renders the prompt of a conversation. Raises InputError if the chat template refuses its turns."""
    escaper = ControlTokenEscaper(added_texts)
    turns, tools = list(conversation.turns), conversation.tools
    if tools and not call_format.is_native:
        turns, tools = _with_instructions(turns, tools, call_format), ()
    names = {call.id: call.name for turn in turns for call in turn.calls}
    messages = [escaper.escape(_message(turn, call_format, names)) for turn in turns]
    if conversation.continue_final:
        messages[-1]["content"] += escaper.end_marker
    rendered = template.render(
        messages,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final,
        tools=escaper.escape([tool_as_json(tool) for tool in tools]) or None,
        variables=escaper.escape(dict(conversation.template_variables)),
    )
    if conversation.continue_final:
        before, end_marker, _ = rendered.partition(escaper.end_marker)
        if not end_marker:
            raise InputError("the chat template changes the last turn, so it cannot be continued")
        rendered = before
    return escaper.restore(rendered)


def _with_instructions(turns: list[Turn], tools: Sequence[ToolDefinition], call_format: ToolFormat) -> list[Turn]:
    """Adds the tool instructions to the system turn, or to a new one."""
    text = tool_instructions(tools, call_format)
    if turns and turns[0].role == "system":
        return [replace(turns[0], text=f"{turns[0].text}\n\n{text}"), *turns[1:]]
    return [Turn("system", text), *turns]


def _message(turn: Turn, call_format: ToolFormat, names: Mapping[str, str]) -> dict[str, Any]:
    """Converts a turn to a chat template's message. Calls and results become text if the template has none.

    names: {id of a call: name of its tool}.
    """
    if not call_format.is_native:
        return _plain_message(turn, call_format, names)
    message: dict[str, Any] = {"role": turn.role, "content": turn.text} | _speaker_name(turn)
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parsed_arguments(call.arguments)},
            }
            for call in turn.calls
        ]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": _tool_name(turn, names)}
    return message


def _plain_message(turn: Turn, call_format: ToolFormat, names: Mapping[str, str]) -> dict[str, Any]:
    if turn.role == "tool":
        return {"role": "user", "content": f"Result of {_tool_name(turn, names)}: {turn.text}"}
    text = "".join([turn.text, *(call_format.render_call(call) for call in turn.calls)])
    return {"role": turn.role, "content": text} | _speaker_name(turn)


def _speaker_name(turn: Turn) -> dict[str, Any]:
    """The speaker's name if the client gave one, which some templates render."""
    return {} if turn.name is None else {"name": turn.name}


def _tool_name(turn: Turn, names: Mapping[str, str]) -> str:
    """The name of the tool whose result a tool turn holds."""
    return turn.name or names.get(turn.call_id or "", "the function")


def _parsed_arguments(arguments: str | Mapping[str, Any]) -> Any:
    """The arguments as JSON; a text that is no JSON as it is. Raises ApiError 400 for too many elements."""
    if not isinstance(arguments, str):
        return arguments
    for _ in scan_steps(arguments.encode(), JsonScan(), "the arguments of a tool call have"):
        pass  # other threads run between two steps
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
