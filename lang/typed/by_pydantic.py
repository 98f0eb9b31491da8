"""Pydantic's view of a type: its models, and unions of several classes. Imported only where Pydantic is.

Its schema says nothing of a dict's keys that are numbers, although it reads only such: here they are held to digits.

Knows: Pydantic's schemas. Must not know: msgspec, constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from plait.lang.typed import patterns

_KEYS = {"int": patterns.INTEGER, "float": patterns.NUMBER, "bool": "true|false"}
_BOUNDS = frozenset(("ge", "gt", "le", "lt", "multiple_of"))


class WithKeys(GenerateJsonSchema):
    """The JSON schema of a type, with a pattern for every dict's keys."""

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        made, key = super().dict_schema(schema), schema.get("keys_schema", {})
        kind = key.get("type")
        if kind in _KEYS and not _BOUNDS & key.keys():
            return made | {"propertyNames": patterns.text_schema(_KEYS[kind])}
        if kind in _KEYS or kind == "tuple" or (kind == "literal" and "propertyNames" not in made):
            raise PydanticUserError("the keys of a dict are texts, or numbers without bounds", code=None)
        return made


def schema_and_reader(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """The schema of `type_` and how its text is read. Raises TypeError for a type that has none."""
    try:
        adapter = TypeAdapter(type_)
        return adapter.json_schema(schema_generator=WithKeys), adapter.validate_json
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise TypeError(str(error).splitlines()[0]) from None
