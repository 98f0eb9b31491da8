"""The JSON schema of a Python type, from msgspec's view of it: dataclasses, TypedDicts, containers, unions, enums.

Objects are closed (no names but the type's own) and texts with a form, such as dates, get its pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from typing import Any

import msgspec
from msgspec import inspect

from plait.lang.typed import patterns
from plait.lang.typed.schema_rewriting import UnknownType, with_finite_bounds

_TEXTS = {
    inspect.DateType: patterns.DATE,
    inspect.TimeType: patterns.TIME,
    inspect.DateTimeType: patterns.DATETIME,
    inspect.TimeDeltaType: patterns.DURATION,
    inspect.UUIDType: patterns.UUID,
    inspect.DecimalType: patterns.NUMBER,
}
_NUMBER_KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}


def schema_of(type_: Any) -> dict[str, Any]:
    """The schema of `type_`. Raises TypeError (UnknownType is one) for a type that msgspec or this cannot write.

    >>> schema_of(list[bool])
    {'type': 'array', 'items': {'type': 'boolean'}}
    """
    writer = _Writer()
    schema = writer.write(inspect.type_info(type_))
    return schema | ({"$defs": writer.definitions} if writer.definitions else {})


class _Writer:
    """One schema in the making; objects are written once, under `$defs`."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def write(self, node: inspect.Type) -> dict[str, Any]:
        pattern = _TEXTS.get(type(node))
        return patterns.text_schema(pattern) if pattern is not None else self._write(node)

    @singledispatchmethod
    def _write(self, node: inspect.Type) -> dict[str, Any]:
        raise UnknownType(f"{type(node).__name__.removesuffix('Type')} values have no JSON form here")

    @_write.register
    def _(self, node: inspect.AnyType) -> dict[str, Any]:
        return {}

    @_write.register
    def _(self, node: inspect.NoneType) -> dict[str, Any]:
        return {"type": "null"}

    @_write.register
    def _(self, node: inspect.BoolType) -> dict[str, Any]:
        return {"type": "boolean"}

    @_write.register
    def _(self, node: inspect.IntType) -> dict[str, Any]:
        return with_finite_bounds({"type": "integer"} | _bounds(node))

    @_write.register
    def _(self, node: inspect.FloatType) -> dict[str, Any]:
        return with_finite_bounds({"type": "number"} | _bounds(node))

    @_write.register
    def _(self, node: inspect.StrType) -> dict[str, Any]:
        said = {"minLength": node.min_length, "maxLength": node.max_length, "pattern": node.pattern}
        return {"type": "string"} | _without_none(said)

    @_write.register
    def _(self, node: inspect.EnumType) -> dict[str, Any]:
        return {"enum": [member.value for member in node.cls]}

    @_write.register
    def _(self, node: inspect.LiteralType) -> dict[str, Any]:
        return {"enum": list(node.values)}

    @_write.register
    def _(self, node: inspect.UnionType) -> dict[str, Any]:
        return {"anyOf": [self.write(each) for each in node.types]}

    @_write.register
    def _(self, node: inspect.Metadata) -> dict[str, Any]:
        return self.write(node.type) | (node.extra_json_schema or {})

    @_write.register(inspect.ListType)
    @_write.register(inspect.VarTupleType)
    @_write.register(inspect.CollectionType)
    @_write.register(inspect.SetType)
    @_write.register(inspect.FrozenSetType)
    def _(self, node: Any) -> dict[str, Any]:
        said = {"minItems": node.min_length, "maxItems": node.max_length}
        return {"type": "array", "items": self.write(node.item_type)} | _without_none(said)

    @_write.register
    def _(self, node: inspect.TupleType) -> dict[str, Any]:
        return _array([self.write(each) for each in node.item_types])

    @_write.register
    def _(self, node: inspect.DictType) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "additionalProperties": self.write(node.value_type)}
        key = self._key(node.key_type)
        if key != {"type": "string"}:
            schema["propertyNames"] = key
        return schema

    def _key(self, node: inspect.Type) -> dict[str, Any]:
        """Names of an object are texts: numbers are written as such, and read back."""
        match node:
            case inspect.IntType() | inspect.FloatType():
                if _bounds(node):
                    raise UnknownType("keys of a dict that are numbers with bounds have no JSON form here")
                is_int = isinstance(node, inspect.IntType)
                return patterns.text_schema(patterns.INTEGER if is_int else patterns.NUMBER)
            case inspect.EnumType() | inspect.LiteralType():
                values = self.write(node)["enum"]
                if None in values:
                    raise UnknownType("keys of a dict are texts or numbers, not None")
                return {"enum": [str(value) for value in values]}
            case inspect.StrType():
                return self.write(node)
        if type(node) in _TEXTS:
            return self.write(node)
        raise UnknownType(f"keys of a dict are texts or numbers, not {type(node).__name__.removesuffix('Type')} values")

    @_write.register(inspect.DataclassType)
    @_write.register(inspect.TypedDictType)
    def _(self, node: Any) -> dict[str, Any]:
        return self._definition_ref(node, lambda: self._object(node.fields))

    @_write.register
    def _(self, node: inspect.StructType) -> dict[str, Any]:
        def write() -> dict[str, Any]:
            if node.array_like:
                tag = [{"const": node.tag}] if node.tag_field is not None else []
                return _array([*tag, *(self.write(field.type) for field in node.fields)])
            return self._object(node.fields, {} if node.tag_field is None else {node.tag_field: {"const": node.tag}})

        return self._definition_ref(node, write)

    @_write.register
    def _(self, node: inspect.NamedTupleType) -> dict[str, Any]:
        return self._definition_ref(node, lambda: _array([self.write(field.type) for field in node.fields]))

    def _object(self, fields: Sequence[inspect.Field], first: dict[str, Any] | None = None) -> dict[str, Any]:
        properties = (first or {}) | {field.encode_name: self.write(field.type) for field in fields}
        required = [*(first or {}), *(field.encode_name for field in fields if field.required)]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _definition_ref(self, node: Any, write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A reference to the definition of `node.cls`, so that types may hold themselves."""
        if node.cls not in self._names:
            base = getattr(node.cls, "__name__", "type")
            name = base if base not in self.definitions else f"{base}{len(self.definitions)}"
            self._names[node.cls] = name
            self.definitions[name] = {}
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{self._names[node.cls]}"}


def _array(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}


def _bounds(node: Any) -> dict[str, Any]:
    return _without_none({keyword: getattr(node, name) for name, keyword in _NUMBER_KEYWORDS.items()})


def _without_none(said: dict[str, Any]) -> dict[str, Any]:
    return {keyword: value for keyword, value in said.items() if value is not None}


def decoder_of(type_: Any) -> Callable[[str], Any]:
    """Reads a JSON text as a value of `type_`; raises msgspec.DecodeError (a ValueError)."""
    return msgspec.json.Decoder(type_).decode
