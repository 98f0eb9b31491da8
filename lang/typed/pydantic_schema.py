"""JSON schemas and parsers of types that need Pydantic: its models, and unions of several classes.

Imported only if Pydantic is installed. Pydantic's own schema does not constrain number keys of a dict, although its
parser accepts only numbers there; this one adds a pattern for them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import JsonSchemaValue

from plait.lang.typed import patterns
from plait.lang.typed.pydantic_texts import ReadableTextGenerator, refuse

_KEYS = {"int": patterns.INTEGER, "float": patterns.NUMBER, "decimal": patterns.NUMBER, "bool": "true|false"}
_BOUNDS = frozenset(("ge", "gt", "le", "lt", "multiple_of", "max_digits", "decimal_places"))
_VALIDATORS = ("function-after", "function-before", "function-wrap")
_PLAIN = (str, int, float, bool, type(None))
_NO_KEYS = ("tuple", "bytes", "model", "dataclass", "typed-dict", "definition-ref")


_UNHASHABLE = ("any", "list", "set", "dict", "model", "dataclass", "typed-dict", "definition-ref", "generator", "chain")


class ReadableSchemaGenerator(ReadableTextGenerator):
    """Generates schemas with a pattern for the keys of every dict. Raises PydanticUserError for a type whose schema
    allows values that Pydantic cannot parse, since a complete generated value must always be readable."""

    def set_schema(self, schema: Any) -> JsonSchemaValue:
        return _set_of(schema, super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> JsonSchemaValue:
        return _set_of(schema, super().frozenset_schema(schema))

    def enum_schema(self, schema: Any) -> JsonSchemaValue:
        if not all(isinstance(member.value, _PLAIN) for member in schema["members"]):
            raise PydanticUserError(
                f"{schema['cls'].__name__} has members that are not text, numbers, bools or None", code=None
            )
        return super().enum_schema(schema)

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        member = next((value for value in schema["expected"] if isinstance(value, enum.Enum)), None)
        if member is not None:
            name = type(member).__name__
            message = f"a Literal inside another type cannot contain {member}; use {name} itself, or its values"
            raise PydanticUserError(message, code=None)
        return super().literal_schema(schema)

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        json_schema, key = _with_property_names(super().dict_schema(schema)), schema.get("keys_schema", {})
        while key.get("type") in _VALIDATORS:
            key = key["schema"]
        kind = key.get("type", "any")
        if kind in _KEYS and not _BOUNDS & key.keys():
            return json_schema | {"propertyNames": patterns.text_schema(_KEYS[kind])}
        if kind == "enum" and _is_read_from_text(key):
            return json_schema | {"propertyNames": {"enum": [str(member.value) for member in key["members"]]}}
        is_constrained = kind not in (*_KEYS, *_NO_KEYS, "enum") and "propertyNames" in json_schema
        if not is_constrained and not _is_text(key):
            raise PydanticUserError("the keys of a dict must be text, or numbers without bounds", code=None)
        return json_schema


def _with_property_names(json_schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema of a dict in which the pattern of keys is one of all names; Pydantic parses no other names."""
    if "patternProperties" not in json_schema:
        return json_schema
    rest = {name: value for name, value in json_schema.items() if name != "patternProperties"}
    ((pattern, values),) = json_schema["patternProperties"].items()
    return rest | {"additionalProperties": values, "propertyNames": {"type": "string", "pattern": pattern}}


def _set_of(schema: Any, json_schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema without `uniqueItems`: items that repeat are one item of the set that is read."""
    if schema.get("min_length", 0) > 1:
        refuse("a constraint cannot ensure that a set has at least two different items")
    if not _is_hashable(schema.get("items_schema", {})):
        refuse("a constraint cannot ensure that the items of this set are hashable; name their type")
    return {name: value for name, value in json_schema.items() if name != "uniqueItems"}


def _is_hashable(schema: Any) -> bool:
    """Whether all values of a core schema can be items of a set."""
    kind = schema.get("type", "any")
    if kind == "nullable" or kind in _VALIDATORS:
        return _is_hashable(schema["schema"])
    if kind == "union":
        return all(_is_hashable(choice[0] if isinstance(choice, tuple) else choice) for choice in schema["choices"])
    if kind == "tuple":
        return all(map(_is_hashable, schema["items_schema"]))
    return kind not in _UNHASHABLE


def _is_read_from_text(key: Any) -> bool:
    """Whether Pydantic can parse every member of an enum from text: text values, or the numbers of an IntEnum."""
    kinds = {type(member.value) for member in key["members"]}
    return kinds == {str} or (kinds == {int} and issubclass(key["cls"], int))


def _is_text(key: Any) -> bool:
    """Whether any text can be parsed as such a key."""
    kind = key.get("type", "any")
    if kind == "nullable" or kind in _VALIDATORS:
        return _is_text(key["schema"])
    if kind == "union":
        return any(_is_text(choice[0] if isinstance(choice, tuple) else choice) for choice in key["choices"])
    return kind in ("str", "any")


def schema_and_reader(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Returns the schema of `type_` and a parser of its JSON text. Raises TypeError for an unsupported type."""
    try:
        adapter = TypeAdapter(type_)
        return adapter.json_schema(schema_generator=ReadableSchemaGenerator), adapter.validate_json
    except (PydanticSchemaGenerationError, PydanticUserError, ImportError) as error:  # of a package for a type of text
        raise TypeError(str(error).splitlines()[0]) from None
