"""Custom tools of OpenAI's APIs: their input is a text, which a grammar may constrain.

The model calls one as a function with the parameter `input`, in the form that its chat template has for calls.

Source: https://platform.openai.com/docs/guides/function-calling#custom-tools.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from plait.constrained.specs import Lark, Regex
from plait.runtime.chat.call_constraint import INPUT
from plait.runtime.server.chat.conversation import ToolDefinition
from plait.runtime.server.protocols.shared import StrictStruct, build_constraint

_SYNTAXES = {"lark": Lark, "regex": Regex}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters of a JSON string that are complete: half of a surrogate pair waits for the other half.
_HEX = "[0-9a-fA-F]"
_CHARACTERS = re.compile(
    rf'(?:[^"\\]|\\[^u]|\\u[dD][89aAbB]{_HEX}{{2}}\\u{_HEX}{{4}}|\\u(?![dD][89aAbB]){_HEX}{{4}})*', re.DOTALL
)


class TextInput(StrictStruct, tag_field="type", tag="text"):
    """Any text."""


class Grammar(StrictStruct):
    """Lark's notation, or a pattern of Python's syntax."""

    definition: str
    syntax: Literal["lark", "regex"]


class GrammarInput(Grammar, tag_field="type", tag="grammar"):
    """A text of the grammar."""


def custom_tool(name: str, description: str | None, grammar: Grammar | None, place: str) -> ToolDefinition:
    """The definition of a custom tool. `place`: JSON path of its grammar, for errors. Raises ApiError 400."""
    text = {"type": "string"}
    spec = None
    if grammar is not None:
        spec = build_constraint(f"{place}.definition", _SYNTAXES[grammar.syntax], grammar.definition)
        kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
        text["description"] = f"Text of this {kind}:\n{grammar.definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return ToolDefinition(name, description or "", parameters, f"{place}.definition" if spec else place, input=spec)


class InputReader:
    """Reads the input of a call from its arguments, which arrive in pieces.

    >>> reader = InputReader()
    >>> [reader.add(piece) for piece in ('{"inp', 'ut": "a', chr(92), 'n"}')]
    ['', 'a', '', '\\n']
    """

    def __init__(self) -> None:
        self._rest = ""
        self._is_open = False

    def add(self, arguments: str) -> str:
        """Adds a piece of the arguments, and returns what is new of the input."""
        self._rest += arguments
        if not self._is_open:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._rest, self._is_open = self._rest[begin.end() :], True
        found = _CHARACTERS.match(self._rest)
        assert found is not None
        self._rest = self._rest[found.end() :]
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
