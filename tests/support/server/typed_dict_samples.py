"""Sample values for the fields of a client package's request types (TypedDicts and pydantic models)."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union

MAX_DEPTH = 4  # of containers; deeper ones get one value


class Sample(NamedTuple):
    """A value; `path` has the fields of nested TypedDicts that lead to the optional field that it sets."""

    value: Any
    path: tuple[str, ...] = ()


def fields_of(typed: Any) -> dict[str, Any]:
    """Name to type, of all fields of a TypedDict or a pydantic model, required or not."""
    if hasattr(typed, "model_fields"):
        return {name: field.annotation for name, field in typed.model_fields.items()}
    return typing.get_type_hints(typed, include_extras=True)


def samples(kind: Any, depth: int = 0) -> Iterator[Sample]:
    """Values of `kind`, with every alternative of a union, every literal and every optional field at least once."""
    origin, type_args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        yield from samples(type_args[0], depth)
    elif origin in (Union, UnionType):
        for alternative in type_args:
            yield from samples(alternative, depth)
    elif origin is Literal:
        yield from map(Sample, type_args if depth <= 2 else type_args[:1])
    elif hasattr(kind, "__required_keys__") or hasattr(kind, "model_fields"):  # typing_extensions has its own kind
        yield from _typed_dict(kind, depth)
    elif origin in (dict, Mapping, typing.Mapping) or kind is dict:
        yield Sample({"a": first(type_args[1], depth + 1)} if type_args else {"a": 1})
    elif origin in (list, Iterable, Sequence) or _is_sequence(kind):
        for item in samples(type_args[0], depth + 1):
            yield Sample([item.value], item.path)
    else:
        yield Sample(_PLAIN.get(kind, "x"))


def first(kind: Any, depth: int = 0) -> Any:
    """The first sample of `kind`."""
    return next(samples(kind, depth)).value


def _is_sequence(kind: Any) -> bool:
    return getattr(typing.get_origin(kind), "__name__", "").endswith(("Sequence", "SequenceNotStr"))


def _typed_dict(kind: Any, depth: int) -> Iterator[Sample]:
    hints = fields_of(kind)
    required = {name: first(hint, depth + 1) for name, hint in hints.items() if _is_required(kind, name, hint)}
    yield Sample(required)
    if depth >= MAX_DEPTH:
        return
    for name in hints:
        for sample in samples(hints[name], depth + 1):
            yield Sample(required | {name: sample.value}, (name, *sample.path))


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    """Whether a field is required; `__required_keys__` is wrong for annotations that are strings."""
    if hasattr(kind, "model_fields"):
        return bool(kind.model_fields[name].is_required())
    origin = typing.get_origin(hint)
    return origin is typing.Required or (kind.__total__ and origin is not typing.NotRequired)


_PLAIN: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: True, NoneType: None, object: {"a": 1}, bytes: "x"}
