"""Calls as JSON, for services that take no constraint on calls: a JSON object of a tool's name and its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import GrammarError, JsonSchema, Structural, Trigger
from plait.constrained.tool_arguments import bundled, embed_schema
from plait.runtime.chat.call_constraint import arguments_form
from plait.runtime.errors import ConstraintFailed, InputError
from plait.runtime.tokenizer.json_text import json_text

_DEFINITIONS = "/$defs/"
_HEAD = re.compile(r'(?s:(.*))\{"(\w+)": "\Z')


@dataclass(frozen=True)
class ToolCalls:
    """The tools of a constraint that `call_constraint` made, of which an answer may have one call."""

    spec: Structural

    @property
    def is_required(self) -> bool:
        """Whether the answer is a call."""
        return self.spec.at_least > 0

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as chat APIs take them: names and schemas of the arguments."""
        return [{"name": name, "parameters": json.loads(call.schema or "{}")} for name, call in self._calls.items()]

    @property
    def _calls(self) -> dict[str, Trigger]:
        """The first form of each tool's call."""
        calls: dict[str, Trigger] = {}
        for call in self.spec.calls:
            calls.setdefault(call.name, call)
        return calls

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text of a call. Raises KeyError for a name that no tool has."""
        return render_call(self.spec, self._calls[name], arguments)

    def render_json(self, name: str, arguments: str) -> str:
        """The same for arguments as JSON text. Raises ConstraintFailed if max_tokens cut them off."""
        try:
            return self.render(name, json.loads(arguments))
        except (ValueError, KeyError):
            raise ConstraintFailed(f"the arguments of a call of {name!r} are not complete JSON") from None

    def as_json(self) -> JsonCall | None:
        """Returns the call as one JSON object between two texts; None if it is written in another form."""
        spec, keys = self.spec, set()
        for call in spec.calls:
            before, _, after = call.begin.partition(f'{call.name}"')
            head, key = _HEAD.match(before), re.fullmatch(r', "(\w+)": ', after)
            if head is None or key is None or not isinstance(call.content, str) or call.end[:1] != "}":
                return None
            keys.add((spec.begin + head[1], head[2], key[1], call.end[1:] + spec.end))
        if len(keys) != 1:
            return None
        begin, name_key, arguments_key, end = keys.pop()
        return JsonCall(begin, call_schema(spec.calls, name_key, arguments_key), end)


@dataclass(frozen=True)
class JsonCall:
    """A call that is `begin`, JSON that matches `schema`, `end`."""

    begin: str
    schema: dict[str, Any]
    end: str

    def spaced(self, text: str) -> str:
        """Returns an answer whose call a service wrote, with the white space of JSON that a model writes."""
        before, begin, call = text.partition(self.begin) if self.begin else ("", "", text)
        try:
            value = json.loads(call.removesuffix(self.end))
        except ValueError:  # no call, or one that max_tokens cut off
            return text
        return f"{before}{begin}{json_text(value, ensure_ascii=False)}{self.end if call.endswith(self.end) else ''}"


def render_call(spec: Structural, call: Trigger, arguments: Mapping[str, Any]) -> str:
    """Returns the text of one call that a constraint allows."""
    return f"{spec.begin}{call.begin}{arguments_form(call.content).render(arguments)}{call.end}{spec.end}"


def tool_calls(spec: object) -> ToolCalls | None:
    """Returns the tools of a constraint on calls of tools or free text; None for any other constraint."""
    if not isinstance(spec, Structural) or spec.at_most != 1 or spec.otherwise is not None:
        return None
    return ToolCalls(spec) if all(call.name for call in spec.calls) else None


def call_schema(calls: Sequence[Trigger], name_key: str, arguments_key: str) -> dict[str, Any]:
    """Returns the JSON schema of one of these calls: an object with these two keys.

    Raises GrammarError for a schema that cannot be part of it.
    """
    schemas: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for call in calls:
        try:
            arguments = _arguments_schema(call, definitions)
        except GrammarError as error:
            raise GrammarError(f"tool {call.name!r}: {error.reason}", error.where) from None
        schemas.append(
            {
                "type": "object",
                "properties": {name_key: {"const": call.name}, arguments_key: arguments},
                "required": [name_key, arguments_key],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return schema | ({"$defs": definitions} if definitions else {})


def _arguments_schema(call: Trigger, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of the arguments. What it refers to is added to `definitions` of the call's schema."""
    name = call.name.replace("/", "~1")
    root, needs_root = f"#/$defs/{name}", False

    def place(pointer: str) -> str:
        nonlocal needs_root
        if pointer.startswith(_DEFINITIONS):
            return f"{root}.{pointer.removeprefix(_DEFINITIONS)}"
        needs_root = True  # it leads to another place than the schema's $defs
        return root + pointer

    arguments = embed_schema(json.loads(call.schema or "{}"), place)
    for key, definition in arguments.pop("$defs", {}).items():
        definitions[f"{call.name}.{key}"] = definition
    if not needs_root:
        return arguments
    definitions[call.name] = arguments
    return {"$ref": root}


def self_contained(spec: JsonSchema) -> str:
    """Returns the JSON text of a schema that refers to no other document. Raises InputError if that is impossible."""
    try:
        return bundled(spec).text if spec.schemas else spec.text
    except GrammarError as error:
        raise InputError(f"the schemas beside json_schema cannot be used: {error}") from None
