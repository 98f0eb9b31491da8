"""`partial_value(type, text)`: the value of a type that a JSON text begins. Parts that are complete are read as always.

A part that is not complete is built without validation: objects get their fields so far (the others are None), lists
their items, texts their characters. Everything else is left out until it is complete.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

import msgspec

from plait.lang.partial.annotations import has_pydantic_types
from plait.lang.partial.objects import ObjectShape, shape_of
from plait.runtime.client.partial_json import JsonPart, parse_partial_json
from plait.runtime.errors import InputError

T = TypeVar("T")
ABSENT: Any = object()
_SETS = (set, frozenset)


def partial_value(type: type[T], text: str) -> T | None:
    """Returns the value of a type that the beginning of a JSON text gives, such as a stream that goes on.

    Objects are of the type: a Pydantic model, dataclass, NamedTuple or msgspec struct whose missing fields are None, or
    a TypedDict without its missing keys. Nested objects and lists are partial too; texts are as far as they are.
    Numbers, dates, enums and the like are left out until they are complete. Validators see complete values only.
    None: nothing is there yet. Raises ValueError for a text that begins no JSON value.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Person: name: str; born: int; towns: list[str]
    >>> partial_value(Person, '{"name": "Ada", "born": 1815, "towns": ["Lon')
    Person(name='Ada', born=1815, towns=['Lon'])
    """
    if not isinstance(text, str):
        raise InputError(f"partial_value takes a type and then a text, not {text!r:.80} as the text")
    part = parse_partial_json(text)
    value = ABSENT if part is None else _Builder(text).build(type, part)
    return None if value is ABSENT else value


class _Builder:
    def __init__(self, text: str) -> None:
        self._text = text

    def build(self, type_: Any, part: JsonPart) -> Any:
        """Returns the value of a part, or ABSENT."""
        if part.is_complete:
            try:
                return _decoder(type_)(self._text[part.start : part.end])
            except (ValueError, TypeError, ArithmeticError, KeyError):  # as by a validator; a read of the value says so
                if part.kind in ("string", "scalar"):
                    return ABSENT
        type_ = plain_type(type_)
        if type_ is Any or type_ is object:
            return part.data()
        if is_union(type_):
            return self._member_of_union(type_, part)
        shape = shape_of(type_)
        if shape is not None and shape.is_root:
            value = self.build(shape.fields["root"].type_, part)
            return ABSENT if value is ABSENT else shape.make({"root": value})
        if part.kind == "string":
            return part.value if type_ is str else ABSENT
        if part.kind == "scalar":
            return ABSENT
        owner = get_origin(type_) or type_
        if part.kind == "object":
            return self._object(type_, owner, part)
        return self._array(type_, owner, part)

    def _member_of_union(self, type_: Any, part: JsonPart) -> Any:
        """Builds the only member of a union that the part can be, if there is only one."""
        members = [member for member in get_args(type_) if member is not NoneType and could_be(member, part)]
        return self.build(members[0], part) if len(members) == 1 else ABSENT

    def _object(self, type_: Any, owner: Any, part: JsonPart) -> Any:
        shape = shape_of(type_)
        if shape is not None:
            return self._fields(shape, part)
        if not (isinstance(owner, type) and issubclass(owner, dict)) and not _is_mapping(owner):
            return ABSENT
        key_type, value_type = (*get_args(type_), Any, Any)[:2]
        entries = {key: self.build(value_type, member) for key, member in part.members.items()}
        return {_key(key_type, key): value for key, value in entries.items() if value is not ABSENT}

    def _fields(self, shape: ObjectShape, part: JsonPart) -> Any:
        values: dict[str, Any] = {}
        for key, member in part.members.items():
            field = shape.fields.get(key)
            if field is not None:
                value = self.build(field.type_, member)
                if value is not ABSENT:
                    values[field.name] = value
        return shape.make(values)

    def _array(self, type_: Any, owner: Any, part: JsonPart) -> Any:
        shape = shape_of(type_)
        if shape is not None and shape.is_array:
            fields = list(shape.fields.values())
            items = zip(fields, part.items[shape.num_tags :], strict=False)
            built = {field.name: self.build(field.type_, item) for field, item in items}
            return shape.make({name: value for name, value in built.items() if value is not ABSENT})
        arguments = get_args(type_)
        if owner is tuple and arguments and arguments[-1] is not Ellipsis:
            return tuple(self._items(arguments, part.items))
        item_type = arguments[0] if arguments else Any
        if owner in _SETS:
            complete = [item for item in part.items if item.is_complete]
            return owner(self._items([item_type] * len(complete), complete))
        if shape is not None or not isinstance(owner, type) or not _is_sequence(owner):
            return ABSENT
        values = self._items([item_type] * len(part.items), part.items)
        return tuple(values) if owner is tuple else values

    def _items(self, types: Any, parts: list[JsonPart]) -> list[Any]:
        """Returns the items up to the first that is absent."""
        values: list[Any] = []
        for type_, part in zip(types, parts, strict=False):
            value = self.build(type_, part)
            if value is ABSENT:
                break
            values.append(value)
        return values


def _is_mapping(owner: Any) -> bool:
    return isinstance(owner, type) and hasattr(owner, "keys") and hasattr(owner, "__getitem__")


def _is_sequence(owner: type) -> bool:
    return hasattr(owner, "__iter__") and not issubclass(owner, str | bytes | dict)


def _key(key_type: Any, key: str) -> Any:
    """Returns the key of a dict, which is text in JSON, as its type."""
    if plain_type(key_type) in (str, Any):
        return key
    try:
        (read,) = _decoder(dict[key_type, Any])(json.dumps({key: None}))
    except (ValueError, TypeError):
        return key
    return read


def _decoder(type_: Any) -> Callable[[str], Any]:
    """Returns the parser of complete values, that of `gen(type=...)`."""
    try:
        return _cached_decoder(type_)
    except TypeError:  # an annotation that is not hashable
        return _build_decoder(type_)


def _build_decoder(type_: Any) -> Callable[[str], Any]:
    if not has_pydantic_types(type_):
        try:
            return msgspec.json.Decoder(type_).decode
        except TypeError:  # a type that msgspec does not read, such as a union of classes
            pass
    from pydantic import TypeAdapter  # lazy: Pydantic is optional

    return TypeAdapter(type_).validate_json


_cached_decoder = lru_cache(maxsize=1024)(_build_decoder)


# -- members --------------------------------------------------------------------------------------
# Types without their wrappers, and which member of a union a partial JSON value can be.

_WRAPPERS = (typing.Required, typing.NotRequired, typing.Final, typing.ClassVar)
_NUMBERS = (int, float, bool, complex)


def plain_type(type_: Any) -> Any:
    """Returns a type without Annotated, NewType, Required, type aliases and type variables."""
    while True:
        origin = get_origin(type_)
        if origin is Annotated:
            type_ = type_.__origin__
        elif origin in _WRAPPERS:
            type_ = get_args(type_)[0]
        elif isinstance(type_, NewType):
            type_ = type_.__supertype__
        elif isinstance(type_, TypeVar):
            return plain_type(type_.__bound__) if type_.__bound__ is not None else Any
        elif hasattr(type_, "__value__") and hasattr(type_, "__type_params__") and not isinstance(type_, type):
            type_ = type_.__value__
        else:
            return type_


def is_union(type_: Any) -> bool:
    return get_origin(type_) in (Union, types.UnionType)


def could_be(type_: Any, part: JsonPart) -> bool:
    """Whether an incomplete JSON value may become a value of the type, as far as its fields so far tell."""
    type_ = plain_type(type_)
    if type_ is Any or type_ is object:
        return True
    if is_union(type_):
        return any(could_be(member, part) for member in get_args(type_))
    if type_ is types.NoneType:
        return False
    owner = get_origin(type_) or type_
    if owner is Literal:
        return part.kind in ("string", "scalar")
    shape = shape_of(type_)
    if shape is not None and shape.is_root:
        return could_be(shape.fields["root"].type_, part)
    if shape is not None:
        if part.kind != ("array" if shape.is_array else "object"):
            return False
        return all(_allows(type_, key, member) for key, member in part.members.items())
    is_class = isinstance(owner, type)
    is_mapping = is_class and hasattr(owner, "keys")
    is_text_or_number = is_class and (issubclass(owner, str) or not hasattr(owner, "__iter__"))
    match part.kind:
        case "object":
            return is_mapping
        case "array":
            return is_class and not is_mapping and not is_text_or_number
    return is_text_or_number and owner not in _NUMBERS


def _allows(type_: Any, key: str, member: JsonPart) -> bool:
    """Whether an object of the type may have this member."""
    shape = shape_of(type_)
    assert shape is not None
    if shape.tag is not None and key == shape.tag[0]:
        return not member.is_complete or bool(member.value == shape.tag[1])
    field = shape.fields.get(key)
    if field is None:
        return False
    plain = plain_type(field.type_)
    if get_origin(plain) is Literal and member.is_complete:
        return member.value in get_args(plain)
    return True
