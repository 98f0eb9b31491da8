"""A reader of calls for tests: the marks of a Structural by hand, what stands between them by plain rules."""

from __future__ import annotations

import json
import re
from typing import Any

JSON_TYPES = {type(None): "null", bool: "boolean", list: "array", dict: "object", int: "number", float: "number"}


def read_json(text: str) -> tuple[Any, str]:
    """The JSON value at the beginning of a text, and the rest."""
    value, end = json.JSONDecoder().raw_decode(text)
    return value, text[end:]


def types_of(schema: Any) -> set[str]:
    """The types that a generated schema allows: these have `type`, `enum`, or a list of such schemas as `anyOf`."""
    if schema is True or schema == {}:
        return {"null", "boolean", "number", "string", "array", "object"}
    if "enum" in schema:
        return {"string" if isinstance(value, str) else JSON_TYPES[type(value)] for value in schema["enum"]}
    if "anyOf" in schema:
        return {kind for inner in schema["anyOf"] for kind in types_of(inner)}
    listed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return {"number" if kind == "integer" else kind for kind in listed}


def read_element(text: str, schema: Any) -> Any:
    """The value of an element: JSON if it is that of a type other than string that the schema allows, else the text."""
    kinds = types_of(schema)
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except ValueError:
        value = text
    if not isinstance(value, str) and ("string" not in kinds or JSON_TYPES[type(value)] in kinds):
        return value
    return text


def read_elements(
    text: str, properties: dict[str, Any], open_: str, close: str, separator: str
) -> tuple[dict[str, Any], str]:
    """The arguments at the beginning of a text, and the rest."""
    before, after = map(re.escape, open_.split("{name}"))
    found: dict[str, Any] = {}
    while match := re.match((re.escape(separator) if found else "") + before + "(.+?)" + after, text, re.DOTALL):
        value, _, text = text[match.end() :].partition(close)
        found[match[1]] = read_element(value, properties.get(match[1], True))
    return found, text


def write_element(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_elements(arguments: dict[str, Any], open_: str, close: str, separator: str) -> str:
    return separator.join(
        f"{open_.replace('{name}', name)}{write_element(value)}{close}" for name, value in arguments.items()
    )
