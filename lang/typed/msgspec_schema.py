"""The JSON schema of a Python type that msgspec understands: dataclasses, TypedDicts, containers, unions, enums.

Objects are closed (no additional properties), and types that are written as text, such as dates, get a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Returns the schema of `type_`. Raises TypeError (such as UnknownType) for an unsupported type.

    >>> schema_of(list[bool])
    {'type': 'array', 'items': {'type': 'boolean'}}
    """
    writer = _Writer()
    schema = writer.write(inspect.type_info(type_))
    return schema | ({"$defs": writer.definitions} if writer.definitions else {})


class _Writer:
    """Builds one schema. Objects are written once, under `$defs`."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def write(self, node: inspect.Type) -> dict[str, Any]:
        pattern = _TEXTS.get(type(node))
        return patterns.text_schema(pattern) if pattern is not None else self._scalar(node) or self._container(node)

    def _scalar(self, node: inspect.Type) -> dict[str, Any] | None:
        """Returns the schema of a value without parts; None for other types."""
        match node:
            case inspect.NoneType():
                return {"type": "null"}
            case inspect.BoolType():
                return {"type": "boolean"}
            case inspect.IntType():
                return with_finite_bounds({"type": "integer"} | _bounds(node))
            case inspect.FloatType():
                return with_finite_bounds({"type": "number"} | _bounds(node))
            case inspect.StrType():
                keywords = {"minLength": node.min_length, "maxLength": node.max_length, "pattern": node.pattern}
                return {"type": "string"} | _without_none(keywords)
            case inspect.EnumType():
                return {"enum": [member.value for member in node.cls]}
            case inspect.LiteralType():
                return {"enum": list(node.values)}
        return None

    def _container(self, node: inspect.Type) -> dict[str, Any]:
        match node:
            case inspect.AnyType():
                return {}
            case inspect.UnionType():
                return {"anyOf": [self.write(member) for member in node.types]}
            case inspect.Metadata():
                return self.write(node.type) | (node.extra_json_schema or {})
            case inspect.SetType() | inspect.FrozenSetType():
                if (node.min_length or 0) > 1:
                    raise UnknownType("a constraint cannot ensure that a set has at least two different items")
                if not _is_hashable(node.item_type):
                    text = "a constraint cannot ensure that the items of this set are hashable; name their type"
                    raise UnknownType(text)
                return self._items(node)
            case inspect.ListType() | inspect.VarTupleType() | inspect.CollectionType():  # sets are collections, too
                return self._items(node)
            case inspect.TupleType():
                return _array([self.write(item_type) for item_type in node.item_types])
            case inspect.DictType():
                key = self._key(node.key_type)
                names = {} if key == {"type": "string"} else {"propertyNames": key}
                return {"type": "object", "additionalProperties": self.write(node.value_type)} | names
            case inspect.DataclassType() | inspect.TypedDictType():
                return self._definition_ref(node, lambda: self._object(node.fields))
            case inspect.StructType():
                return self._definition_ref(node, lambda: self._struct(node))
            case inspect.NamedTupleType():
                return self._definition_ref(node, lambda: _array([self.write(field.type) for field in node.fields]))
        raise UnknownType(f"{type(node).__name__.removesuffix('Type')} values cannot be written as JSON here")

    def _items(self, node: Any) -> dict[str, Any]:
        keywords = {"minItems": node.min_length, "maxItems": node.max_length}
        return {"type": "array", "items": self.write(node.item_type)} | _without_none(keywords)

    def _struct(self, node: inspect.StructType) -> dict[str, Any]:
        if node.array_like:
            tag = [{"const": node.tag}] if node.tag_field is not None else []
            return _array([*tag, *(self.write(field.type) for field in node.fields)])
        return self._object(node.fields, {} if node.tag_field is None else {node.tag_field: {"const": node.tag}})

    def _key(self, node: inspect.Type) -> dict[str, Any]:
        """Returns the schema of a key. Keys of JSON objects are text, so number keys are written as text."""
        match node:
            case inspect.IntType() | inspect.FloatType():
                if _bounds(node):
                    raise UnknownType("number keys of a dict cannot have bounds")
                is_int = isinstance(node, inspect.IntType)
                return patterns.text_schema(patterns.INTEGER if is_int else patterns.NUMBER)
            case inspect.EnumType() | inspect.LiteralType():
                values = self.write(node)["enum"]
                if None in values:
                    raise UnknownType("keys of a dict must be text or numbers, not None")
                return {"enum": [str(value) for value in values]}
            case inspect.StrType():
                return self.write(node)
        if type(node) in _TEXTS:
            return self.write(node)
        key_type = type(node).__name__.removesuffix("Type")
        raise UnknownType(f"keys of a dict must be text or numbers, not {key_type} values")

    def _object(self, fields: Sequence[inspect.Field], first: dict[str, Any] | None = None) -> dict[str, Any]:
        properties = (first or {}) | {field.encode_name: self.write(field.type) for field in fields}
        required = [*(first or {}), *(field.encode_name for field in fields if field.required)]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _definition_ref(self, node: Any, write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns a reference to the definition of `node.cls`, which also makes recursive types possible."""
        if node.cls not in self._names:
            base = getattr(node.cls, "__name__", "type")
            name = base if base not in self.definitions else f"{base}{len(self.definitions)}"
            self._names[node.cls] = name
            self.definitions[name] = {}
            self.definitions[name] = write()
        return {"$ref": f"#/$defs/{self._names[node.cls]}"}


def _array(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}


def _is_hashable(node: inspect.Type) -> bool:
    """Whether all values of the type can be items of a set."""
    match node:
        case inspect.UnionType():
            return all(map(_is_hashable, node.types))
        case inspect.TupleType():
            return all(map(_is_hashable, node.item_types))
        case inspect.VarTupleType() | inspect.FrozenSetType():
            return _is_hashable(node.item_type)
        case inspect.Metadata():
            return _is_hashable(node.type)
        case inspect.NamedTupleType():
            return all(_is_hashable(field.type) for field in node.fields)
        case inspect.DataclassType() | inspect.StructType():
            return node.cls.__hash__ is not None and all(_is_hashable(field.type) for field in node.fields)
    kinds = inspect.AnyType | inspect.ListType | inspect.CollectionType | inspect.SetType | inspect.DictType
    return not isinstance(node, kinds | inspect.TypedDictType)


def _bounds(node: Any) -> dict[str, Any]:
    return _without_none({keyword: getattr(node, name) for name, keyword in _NUMBER_KEYWORDS.items()})


def _without_none(keywords: dict[str, Any]) -> dict[str, Any]:
    return {keyword: value for keyword, value in keywords.items() if value is not None}


def decoder_of(type_: Any) -> Callable[[str], Any]:
    """Returns a function that parses JSON text to a `type_` and raises msgspec.DecodeError (a ValueError)."""
    return msgspec.json.Decoder(type_).decode
