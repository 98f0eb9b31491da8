"""The schema of a tool's arguments, as it is used in a constraint, and what else the language asks about schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.constrained.json_schema.bundling import bundled
from plait.constrained.json_schema.embedded_resource import embed_schema
from plait.constrained.structural.elements import parameter_kinds

__all__ = ["bundled", "closed_arguments", "embed_schema", "parameter_kinds"]

_OPENING = (  # keywords by which a schema says more about the properties of an object than `properties` does
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
    *("allOf", "anyOf", "oneOf", "if", "not", "$ref", "$dynamicRef", "$recursiveRef"),
    *("dependentSchemas", "dependencies"),
)


def closed_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments without arguments that it does not name, unless it says otherwise.

    It is closed if it lists `properties`, and neither another keyword nor a required name opens it. Schemas within it
    stay as they are.

    >>> closed_arguments({"type": "object", "properties": {"a": {}}})["additionalProperties"]
    False
    >>> closed_arguments({"type": "object"})
    {'type': 'object'}
    """
    listed, required = parameters.get("properties"), parameters.get("required", [])
    if not isinstance(listed, Mapping) or not isinstance(required, list | tuple):
        return dict(parameters)
    if any(keyword in parameters for keyword in _OPENING):
        return dict(parameters)
    if not all(isinstance(name, str) and name in listed for name in required):
        return dict(parameters)
    return {**parameters, "additionalProperties": False}
