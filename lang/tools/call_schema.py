"""The JSON schema of a call of one of several tools: an object with the tool's name and its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plait.constrained.specs import GrammarError
from plait.constrained.tool_arguments import closed_arguments, embed_schema
from plait.lang.tools.tool import Tool

_DEFINITIONS = "/$defs/"


def call_schema(tools: Iterable[Tool], name_key: str, arguments_key: str) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of `tools`: an object with these two keys.

    Raises GrammarError for a tool whose schema cannot be part of it.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        try:
            arguments = _arguments_schema(tool, definitions)
        except GrammarError as error:
            raise GrammarError(f"tool {tool.name!r}: {error.reason}", error.where) from None
        calls.append(
            {
                "type": "object",
                "properties": {name_key: {"const": tool.name}, arguments_key: arguments},
                "required": [name_key, arguments_key],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema | ({"$defs": definitions} if definitions else {})


def _arguments_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of the tool's arguments. What it refers to is added to `definitions` of the call's schema."""
    name = tool.name.replace("/", "~1")
    root, needs_root = f"#/$defs/{name}", False

    def place(pointer: str) -> str:
        nonlocal needs_root
        if pointer.startswith(_DEFINITIONS):
            return f"{root}.{pointer.removeprefix(_DEFINITIONS)}"
        needs_root = True  # it leads to another place than the tool's $defs
        return root + pointer

    arguments = embed_schema(closed_arguments(tool.parameters), place)
    for key, definition in arguments.pop("$defs", {}).items():
        definitions[f"{tool.name}.{key}"] = definition
    if not needs_root:
        return arguments
    definitions[tool.name] = arguments
    return {"$ref": root}
