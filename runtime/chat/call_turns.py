"""Turns with a call and with its result, for the rendering of a conversation turn by turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.runtime.chat.derivation.template_probe import call_message
from plait.runtime.chat.formats.call_format import CallFormat, JsonArguments, KeywordArguments, formed_ids
from plait.runtime.tokenizer.turn_texts import TurnShape

_ARGUMENT, _ID = "q", "Qzidzq"
_JSON_PROBE = '"\n'


@dataclass(frozen=True)
class CallTurn:
    """An assistant's turn with one call. call_id: what the template is given; see `call_id`."""

    call_format: CallFormat
    name: str
    call_id: str
    role: str = "assistant"

    def message(self, content: str) -> dict[str, Any]:
        """Returns the message, with `content` as an argument of the call."""
        arguments = self.call_format.template_arguments({_ARGUMENT: content})
        return {"role": self.role, "content": "", **call_message((self.call_id, self.name, arguments))}

    def locate(self, text: str, content: str) -> str:
        """Returns a rendering in which `content` stands for the whole call."""
        form = self.call_format.arguments
        written = self.call_format.render_calls([(_ID, self.name, {_ARGUMENT: content})])
        if isinstance(form, JsonArguments) and form.style == "any":
            pattern = r"\s*".join(map(re.escape, re.sub(r"\s", "", written)))
        else:
            pattern = re.escape(written)
        if isinstance(form, KeywordArguments):
            pattern = pattern.replace('"', "[\"']")
        pattern = pattern.replace(_ID, r"[A-Za-z0-9_.:-]+")
        located, number = re.subn(pattern, content, text, count=1)
        return located if number else text.replace(content, "")  # no such turn, rather than a wrong one


@dataclass(frozen=True)
class ResultTurn:
    """The turn with the result of a call."""

    name: str
    call_id: str
    role: str = "tool"

    def message(self, content: str) -> dict[str, Any]:
        """Returns the message with this result."""
        return {"role": self.role, "content": content, "tool_call_id": self.call_id, "name": self.name}

    def locate(self, text: str, content: str) -> str:
        """Returns the rendering as it is."""
        return text


def call_id(call_format: CallFormat, name: str, number: int, written: str = "") -> str:
    """Returns the id of a conversation's call that the template is given: the one that the model has written, or one
    of a form that templates accept. `number`: how many calls there were before."""
    formed = formed_ids(call_format.id_form, [name] * (number + 1))
    return formed[number] if formed else written or f"{number:09}"


def writes_json(turn_suffix: Callable[[TurnShape], str], result: ResultTurn) -> bool:
    """Whether the template writes the text of a result within a JSON string. turn_suffix: of a turn that is next.

    Raises InputError if the template takes no such turn.
    """
    return turn_suffix(_EscapedResult(result.name, result.call_id)).startswith(json.dumps(_JSON_PROBE)[1:-1])


@dataclass(frozen=True)
class _EscapedResult(ResultTurn):
    """A result that ends with characters that JSON escapes."""

    def message(self, content: str) -> dict[str, Any]:
        return super().message(content + _JSON_PROBE)
