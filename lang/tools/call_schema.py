"""The JSON schema of a call of one of several tools: an object with the tool's name and its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.lang.tools.tool import Tool

_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are not schemas
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPEN_OBJECT = (  # keywords that say more about the properties of an object than `properties` does
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("allOf", "anyOf", "oneOf", "if", "not", "$ref"),
)


def call_schema(tools: Iterable[Tool], name_key: str, arguments_key: str) -> dict[str, Any]:
    """Returns the JSON schema of a call of one of `tools`: an object with these two keys."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        arguments = _arguments_schema(tool, definitions)
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
    schema = _closed(tool.parameters)
    moved = _Relocation(tool.name)
    definitions_of_tool = schema.pop("$defs", {})
    arguments: dict[str, Any] = moved.apply(schema)
    for name, definition in definitions_of_tool.items():
        definitions[f"{tool.name}.{name}"] = moved.apply(definition)
    if not moved.needs_root:
        return arguments
    definitions[tool.name] = arguments
    return {"$ref": moved.root}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object without further properties, if it does not say anything else about them: a
    function takes no other arguments than those that its schema names."""
    if any(keyword in schema for keyword in _OPEN_OBJECT):
        return dict(schema)
    return {**schema, "additionalProperties": False}


class _Relocation:
    """Adjusts the references of one tool's schema to their places in the schema of a call."""

    def __init__(self, tool: str) -> None:
        escaped = tool.replace("/", "~1")
        self.root = f"#/$defs/{escaped}"
        self.needs_root = False  # a reference leads to another place than the tool's $defs
        self._tool = escaped

    def apply(self, schema: Any) -> Any:
        """Returns `schema` with its references adjusted."""
        if isinstance(schema, list):
            return [self.apply(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        return {key: self._keyword(key, value) for key, value in schema.items()}

    def _keyword(self, key: str, value: Any) -> Any:
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            return self._target(value)
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            return {name: self.apply(schema) for name, schema in value.items()}
        return value if key in _VALUES else self.apply(value)

    def _target(self, reference: str) -> str:
        if reference.startswith("#/$defs/"):
            return f"#/$defs/{self._tool}.{reference.removeprefix('#/$defs/')}"
        self.needs_root = True
        return self.root + reference[1:]
