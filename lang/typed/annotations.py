"""Whose bounds a type carries: msgspec and Pydantic each read their own annotations and pass over the other's."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import msgspec

PYDANTIC = ("pydantic", "annotated_types")


def has_msgspec_meta(type_: Any) -> bool:
    """Whether `msgspec.Meta` stands anywhere in the type."""
    return any(isinstance(annotation, msgspec.Meta) for annotation in _annotations_of(type_, {}))


def has_pydantic_types(type_: Any) -> bool:
    """Whether a class of Pydantic's, or one of its annotations such as Field(ge=1), stands anywhere in the type."""
    return any(
        hasattr(annotation, "__pydantic_validator__")
        if isinstance(annotation, type)
        else type(annotation).__module__.partition(".")[0] in PYDANTIC
        for annotation in _annotations_of(type_, {})
    )


def _annotations_of(type_: Any, seen: dict[int, object]) -> Iterator[object]:
    """The classes in a type, and what is annotated to them."""
    if id(type_) in seen:
        return
    seen[id(type_)] = type_  # kept: hints are made when they are asked for, and the next could have this one's id
    if get_origin(type_) is Annotated:
        yield from type_.__metadata__
        yield from _annotations_of(type_.__origin__, seen)
        return
    for part in get_args(type_):
        yield from _annotations_of(part, seen)
    owner = get_origin(type_) or type_
    if isinstance(owner, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        yield from _annotations_of(owner.__value__, seen)
    elif isinstance(owner, type) and owner.__module__ not in ("builtins", "typing", "collections.abc"):
        yield owner
        if getattr(owner, "__annotations__", None):
            for hint in typing.get_type_hints(owner, include_extras=True).values():
                yield from _annotations_of(hint, seen)
