"""Finds a tool call that is written without marks: the whole answer is one JSON object, bare or in a code block.

Small models write such calls. Answers that quote or explain JSON are no calls, so only an object of exactly a tool's
name and valid arguments counts, and none that stands in an earlier message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from plait.constrained.json_validation import json_validation_error
from plait.constrained.tool_arguments import closed_arguments
from plait.runtime.chat.parser import OutputParser, ParsedPart
from plait.runtime.server.chat.conversation import Conversation
from plait.runtime.tokenizer.json_text import json_text

WARNING = "the answer was JSON of a tool's name and arguments without the model's own marks, and was taken as a call"
_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_SPACE = re.compile(r"\s+")


class UntaggedCallParser:
    """Parses one answer as `parser` does, and takes an answer that is one untagged call as a call.

    Text that may be such a call is kept back until the end of the answer. warnings: gets WARNING if there was one.
    """

    def __init__(self, parser: OutputParser, conversation: Conversation, warnings: list[str]) -> None:
        self._parser, self._warnings = parser, warnings
        self._tools = {tool.name: closed_arguments(tool.parameters) for tool in conversation.callable_tools}
        self._earlier = [_SPACE.sub("", turn.text) for turn in conversation.turns]
        self._kept: list[str] | None = []  # the text so far, None once it is no call
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._num_calls + self._parser.num_calls

    @property
    def is_within_arguments(self) -> bool:
        """Whether the last call's arguments are incomplete."""
        return self._parser.is_within_arguments

    def push(self, text: str) -> list[ParsedPart]:
        """Adds output and returns the parts that are certain."""
        return self._pass_on(self._parser.push(text))

    def finish(self) -> list[ParsedPart]:
        """Returns the last parts at the end of the answer."""
        parts = self._pass_on(self._parser.finish())
        if not self._kept:
            return parts
        text, self._kept = "".join(self._kept), None
        call = self._call_in(text)
        if call is None:
            return [*parts, ParsedPart("text", text)]
        self._num_calls = 1
        self._warnings.append(WARNING)
        return [*parts, ParsedPart("call", call[0]), ParsedPart("arguments", call[1])]

    def _pass_on(self, parts: list[ParsedPart]) -> list[ParsedPart]:
        """Keeps text back while all of it may be a call."""
        if self._kept is None:
            return parts
        passed: list[ParsedPart] = []
        for part in parts:
            if part.kind == "reasoning":
                passed.append(part)
                continue
            if self._kept is not None and part.kind == "text":
                self._kept.append(part.text)
                if (start := "".join(self._kept).lstrip()[:3]) and not (start[0] == "{" or "```".startswith(start)):
                    part = ParsedPart("text", "".join(self._kept))
                    self._kept = None
            elif self._kept is not None:  # a call with marks
                passed += [ParsedPart("text", "".join(self._kept))] if self._kept else []
                self._kept = None
            if self._kept is None:
                passed.append(part)
        return passed

    def _call_in(self, text: str) -> tuple[str, str] | None:
        """Returns the name and the arguments of the call that a whole answer is."""
        block = _BLOCK.fullmatch(text.strip())
        written = block[1].strip() if block else text.strip()
        try:
            value = json.loads(written)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, Mapping) or value.keys() != {"name", "arguments"}:
            return None
        name, arguments = value["name"], value["arguments"]
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, Mapping):
            return None
        if any(_SPACE.sub("", written) in earlier for earlier in self._earlier):
            return None
        arguments_text = json_text(arguments, ensure_ascii=False)
        is_valid = json_validation_error(json_text(self._tools[name]), arguments_text) is None
        return (name, arguments_text) if is_valid else None


def may_call_untagged(conversation: Conversation, by_default: bool) -> bool:
    """Whether an answer may be an untagged call: if the request or else the server allows it, tools may be called and
    need not, and nothing constrains an answer without calls."""
    is_wanted = by_default if conversation.untagged_calls is None else conversation.untagged_calls
    is_free = conversation.constraint is None and not conversation.must_call
    return bool(is_wanted and is_free and conversation.callable_tools)
