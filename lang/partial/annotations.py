"""Finds the annotations of msgspec and Pydantic in a type. Each of the two libraries ignores those of the other."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import msgspec

PYDANTIC = ("pydantic", "annotated_types")


def has_msgspec_meta(type_: Any) -> bool:
    """Whether the type contains a `msgspec.Meta` anywhere."""
    return any(isinstance(annotation, msgspec.Meta) for annotation in _annotations_of(type_, {}))


def has_pydantic_types(type_: Any) -> bool:
    """Whether the type contains a class of Pydantic, or an annotation such as Field(ge=1), anywhere."""
    return any(
        hasattr(annotation, "__pydantic_validator__")
        if isinstance(annotation, type)
        else type(annotation).__module__.partition(".")[0] in PYDANTIC
        for annotation in _annotations_of(type_, {})
    )


def _annotations_of(type_: Any, seen: dict[int, object]) -> Iterator[object]:
    """Yields the classes in a type and their annotations. `seen`: visited types by id."""
    if id(type_) in seen:
        return
    seen[id(type_)] = type_  # the reference keeps a temporary hint alive, so that its id is not reused
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
