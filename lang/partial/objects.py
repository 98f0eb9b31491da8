"""`shape_of(type)`: the fields of a class under their names in JSON, and how an object with some of them is made."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_origin

import msgspec

Make = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class ShapeField:
    """`name`: the attribute. `type_`: its annotation."""

    name: str
    type_: Any


@dataclass(frozen=True)
class ObjectShape:
    """`fields`: by the name in JSON, in order. `make(values)` makes an object with these attributes, without
    validation. `is_array`: it is written as an array, with `num_tags` tags before the fields. `tag`: (field, value) of
    a tagged msgspec struct. `is_root`: it is written as its only field, as a Pydantic RootModel."""

    fields: dict[str, ShapeField]
    make: Make
    is_array: bool = False
    num_tags: int = 0
    tag: tuple[str, Any] | None = None
    is_root: bool = False


def shape_of(type_: Any) -> ObjectShape | None:
    """Returns the shape of a class, or None for a type without named fields."""
    try:
        return _cached_shape(type_)
    except TypeError:  # not hashable
        return _build_shape(type_)


def _build_shape(type_: Any) -> ObjectShape | None:
    owner: Any = get_origin(type_) or type_
    if not isinstance(owner, type):
        return None
    if hasattr(owner, "model_construct"):
        return _pydantic_shape(owner)
    try:
        hints = _hints_of(type_, owner)
    except NameError:  # an annotation that cannot be resolved; the object is left out until it is complete
        return None
    if issubclass(owner, msgspec.Struct):
        return None if hasattr(owner, "__post_init__") else _struct_shape(owner, hints)  # it would run
    if dataclasses.is_dataclass(owner):
        names = [field.name for field in dataclasses.fields(owner)]
        fields = {name: ShapeField(name, hints[name]) for name in names}
        return ObjectShape(fields, lambda values: _filled(object.__new__(owner), names, values))
    if typing.is_typeddict(owner):
        return ObjectShape({name: ShapeField(name, hint) for name, hint in hints.items()}, dict)
    if issubclass(owner, tuple) and hasattr(owner, "_fields"):
        fields = {name: ShapeField(name, hints.get(name, Any)) for name in owner._fields}

        def make(values: dict[str, Any]) -> Any:
            return tuple.__new__(owner, [values.get(name) for name in fields])

        return ObjectShape(fields, make, is_array=True)
    return None


_cached_shape = lru_cache(maxsize=1024)(_build_shape)


def _filled(value: Any, names: list[str], values: dict[str, Any]) -> Any:
    """Sets the attributes of an object that was made without its `__init__`, also of frozen ones and of slots."""
    for name in names:
        object.__setattr__(value, name, values.get(name))
    return value


def _struct_shape(owner: Any, hints: dict[str, Any]) -> ObjectShape:
    infos, config = msgspec.structs.fields(owner), owner.__struct_config__
    fields = {info.encode_name: ShapeField(info.name, hints[info.name]) for info in infos}

    def make(values: dict[str, Any]) -> Any:
        return owner(**{info.name: values.get(info.name) for info in infos})  # a struct does not check its fields

    tag = None if config.tag is None else (config.tag_field, config.tag)
    return ObjectShape(fields, make, config.array_like, 1 if config.array_like and tag else 0, tag)


def _pydantic_shape(owner: Any) -> ObjectShape:
    fields = {}
    for name, info in owner.model_fields.items():
        alias = info.validation_alias if isinstance(info.validation_alias, str) else info.alias
        annotation = info.annotation
        for metadata in info.metadata:
            annotation = typing.Annotated[annotation, metadata]
        fields[alias or name] = ShapeField(name, annotation)
    names = list(owner.model_fields)

    def make(values: dict[str, Any]) -> Any:
        value = owner.__new__(owner)
        state = {name: values.get(name) for name in names}
        value.__setstate__(
            {
                "__dict__": state,
                "__pydantic_fields_set__": set(values),
                "__pydantic_extra__": None,
                "__pydantic_private__": None,
            }
        )
        return value

    return ObjectShape(fields, make, is_root=bool(owner.__pydantic_root_model__))


def _hints_of(type_: Any, owner: Any) -> dict[str, Any]:
    """Returns the annotations of a class, with the arguments of a generic one in their places."""
    hints = typing.get_type_hints(owner, include_extras=True)
    parameters = getattr(owner, "__parameters__", ())
    arguments = dict(zip(parameters, typing.get_args(type_), strict=False))
    return {name: _substituted(hint, arguments) for name, hint in hints.items()}


def _substituted(hint: Any, arguments: dict[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return arguments.get(hint, hint.__bound__ or Any)
    own = getattr(hint, "__parameters__", ()) if get_origin(hint) is not None else ()
    return hint[tuple(arguments.get(parameter, Any) for parameter in own)] if own else hint
