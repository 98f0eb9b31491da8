"""Types without their wrappers, and which member of a union a partial JSON value can be."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

from plait.lang.partial.objects import shape_of
from plait.runtime.client.partial_json import JsonPart

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
