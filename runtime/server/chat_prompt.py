"""Turns as the model was trained to read them, and none of a client's texts able to close a turn.

The template renders the real conversation. Before that, whatever in a client's texts reads like a control token, whole
or in part at a text's edge, is replaced by a placeholder; after it, placeholders become plain text. So the template may
trim and compare contents as it likes, and still only its own text holds control tokens.

Knows: templates, turns, formats. Must not know: protocols, token ids.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from plait.runtime.errors import InputError
from plait.runtime.server.conversation import Conversation, Tool, Turn
from plait.runtime.server.formats import ToolFormat, described, instructions
from plait.runtime.tokenizer.chat_template import ChatTemplate

Parts = list[tuple[str, bool]]  # (text, is the chat template's own)


class Defuser:
    """Takes control tokens (`added`: their texts) out of texts, and puts them back as plain text."""

    def __init__(self, added: frozenset[str]) -> None:
        self._search = _search(added)
        self._nonce = secrets.token_hex(8)
        self._taken: list[str] = []
        self._numbers: dict[str, int] = {}
        self.end_mark = f"Qz{self._nonce}endzQ"

    def take(self, value: Any) -> Any:
        """`value`, a text or JSON of texts, without anything that reads like a control token."""
        if isinstance(value, str):
            return self._take_text(value, self._search) if self._search is not None else value
        if isinstance(value, dict):
            return {self.take(key): self.take(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.take(item) for item in value]
        return value

    def _take_text(self, text: str, search: _Search) -> str:
        text = search.whole.sub(lambda match: self._placeholder(match[0]), text)
        if not search.first_letters.isdisjoint(text[-search.longest :]):
            for size in range(min(search.longest, len(text)), 0, -1):
                if text[-size:] in search.beginnings:
                    text = text[:-size] + self._placeholder(text[-size:])
                    break
        if not search.last_letters.isdisjoint(text[: search.longest]):
            for size in range(min(search.longest, len(text)), 0, -1):
                if text[:size] in search.endings:
                    return self._placeholder(text[:size]) + text[size:]
        return text

    def _placeholder(self, text: str) -> str:
        self._numbers[str(len(self._taken))] = len(self._taken)
        self._taken.append(text)
        return f"Qz{self._nonce}n{len(self._taken) - 1}zQ"

    def put_back(self, rendered: str) -> Parts:
        """The template's text and, apart from it, what was taken."""
        mark = f"Qz{self._nonce}n"
        first, *pieces = rendered.split(mark)
        parts = [(first, True)]
        for piece in pieces:
            number, end, rest = piece.partition("zQ")
            if end and number in self._numbers:
                parts += [(self._taken[self._numbers[number]], False), (rest, True)]
            else:  # the template has cut it
                parts.append((mark + piece, True))
        return [part for part in parts if part[0]]


class _Search(NamedTuple):
    """Control tokens as a pattern, and what a text may end or begin with that a template could complete to one."""

    whole: re.Pattern[str]
    beginnings: frozenset[str]
    endings: frozenset[str]
    first_letters: frozenset[str]
    last_letters: frozenset[str]
    longest: int


@lru_cache(maxsize=8)
def _search(added: frozenset[str]) -> _Search | None:
    if not added:
        return None
    whole = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    beginnings = frozenset(text[:at] for text in added for at in range(1, len(text)))
    endings = frozenset(text[at:] for text in added for at in range(1, len(text)))
    letters = frozenset(text[0] for text in added), frozenset(text[-1] for text in added)
    return _Search(whole, beginnings, endings, *letters, max(map(len, added)))


def chat_parts(template: ChatTemplate, added: frozenset[str], asked: Conversation, style: ToolFormat) -> Parts:
    """The prompt as (text, is the template's own) parts. InputError where the template refuses the turns."""
    defuser = Defuser(added)
    turns, tools = list(asked.turns), asked.tools
    if tools and not style.is_template_own:
        turns, tools = _with_instructions(turns, tools, style), ()
    messages = [defuser.take(_message(turn, style, turns)) for turn in turns]
    if asked.continue_final:
        messages[-1]["content"] += defuser.end_mark
    rendered = template.render(
        messages,
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final,
        tools=defuser.take([described(tool) for tool in tools]) or None,
    )
    if asked.continue_final:
        before, found, _ = rendered.partition(defuser.end_mark)
        if not found:
            raise InputError("the chat template changes the last turn, so it cannot be continued")
        rendered = before
    return defuser.put_back(rendered)


def _with_instructions(turns: list[Turn], tools: Sequence[Tool], style: ToolFormat) -> list[Turn]:
    """The system turn, made if need be, says what the tools are."""
    text = instructions(tools, style)
    if turns and turns[0].role == "system":
        return [replace(turns[0], text=f"{turns[0].text}\n\n{text}"), *turns[1:]]
    return [Turn("system", text), *turns]


def _message(turn: Turn, style: ToolFormat, turns: Sequence[Turn]) -> dict[str, Any]:
    """A turn as chat templates read it; calls and results as text where the template knows none."""
    if not style.is_template_own:
        return _plain_message(turn, style, turns)
    message: dict[str, Any] = {"role": turn.role, "content": turn.text} | _who(turn)
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _value(call.arguments)}}
            for call in turn.calls
        ]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": turn.name or _called(turn, turns)}
    return message


def _plain_message(turn: Turn, style: ToolFormat, turns: Sequence[Turn]) -> dict[str, Any]:
    if turn.role == "tool":
        return {"role": "user", "content": f"Result of {_called(turn, turns)}: {turn.text}"}
    text = "".join([turn.text, *(style.write(call) for call in turn.calls)])
    return {"role": turn.role, "content": text} | _who(turn)


def _who(turn: Turn) -> dict[str, Any]:
    """The name of who speaks, where the client gave one: some templates write it."""
    return {} if turn.name is None else {"name": turn.name}


def _called(turn: Turn, turns: Sequence[Turn]) -> str:
    """The name of the tool whose call a turn answers."""
    names = {call.id: call.name for each in turns for call in each.calls}
    return turn.name or names.get(turn.call_id or "", "the function")


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
