"""Pydantic's view of a type: its models, and unions of several classes. Imported only where Pydantic is.

Its schema says nothing of a dict's keys that are numbers, although it reads only such: here they are held to digits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from plait.lang.typed import patterns

_KEYS = {"int": patterns.INTEGER, "float": patterns.NUMBER, "decimal": patterns.NUMBER, "bool": "true|false"}
_BOUNDS = frozenset(("ge", "gt", "le", "lt", "multiple_of", "max_digits", "decimal_places"))
_VALIDATORS = ("function-after", "function-before", "function-wrap")
_PLAIN = (str, int, float, bool, type(None))
_NO_KEYS = ("tuple", "bytes", "model", "dataclass", "typed-dict", "definition-ref")


class DictKeySchemaGenerator(GenerateJsonSchema):
    """The JSON schema of a type, with a pattern for every dict's keys. What Pydantic writes but could not read back is
    refused: a value that was generated in full must not fail when it is read."""

    def enum_schema(self, schema: Any) -> JsonSchemaValue:
        if not all(isinstance(member.value, _PLAIN) for member in schema["members"]):
            raise PydanticUserError(
                f"{schema['cls'].__name__} has members that are no text, number, bool or None", code=None
            )
        return super().enum_schema(schema)

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        member = next((each for each in schema["expected"] if isinstance(each, enum.Enum)), None)
        if member is not None:
            name = type(member).__name__
            said = f"a Literal inside another type cannot hold {member}; take all of {name}, or its values"
            raise PydanticUserError(said, code=None)
        return super().literal_schema(schema)

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        made, key = super().dict_schema(schema), schema.get("keys_schema", {})
        while key.get("type") in _VALIDATORS:
            key = key["schema"]
        kind = key.get("type", "any")
        if kind in _KEYS and not _BOUNDS & key.keys():
            return made | {"propertyNames": patterns.text_schema(_KEYS[kind])}
        if kind == "enum" and _is_read_from_text(key):
            return made | {"propertyNames": {"enum": [str(each.value) for each in key["members"]]}}
        is_held = kind not in (*_KEYS, *_NO_KEYS, "enum") and "propertyNames" in made
        if not is_held and not _is_text(key):
            raise PydanticUserError("the keys of a dict are texts, or numbers without bounds", code=None)
        return made


def _is_read_from_text(key: Any) -> bool:
    """Whether Pydantic finds every member of an enum by its value as text: of numbers, those of an IntEnum."""
    kinds = {type(each.value) for each in key["members"]}
    return kinds == {str} or (kinds == {int} and issubclass(key["cls"], int))


def _is_text(key: Any) -> bool:
    """Whether any name of an object can be read as such a key."""
    kind = key.get("type", "any")
    if kind == "nullable" or kind in _VALIDATORS:
        return _is_text(key["schema"])
    if kind == "union":
        return any(_is_text(each[0] if isinstance(each, tuple) else each) for each in key["choices"])
    return kind in ("str", "any")


def schema_and_reader(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """The schema of `type_` and how its text is read. Raises TypeError for a type that has none."""
    try:
        adapter = TypeAdapter(type_)
        return adapter.json_schema(schema_generator=DictKeySchemaGenerator), adapter.validate_json
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise TypeError(str(error).splitlines()[0]) from None
