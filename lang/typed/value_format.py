"""How the values of a type are written and read: `value_format_of(type)`.

Plain types are written as people write them (42, 2024-05-01, one of an enum's values); everything else is JSON.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin
from uuid import UUID

from plait.constrained.specs import Choices, GrammarError, JsonSchema, Regex, Spec
from plait.lang.typed import patterns
from plait.lang.typed.annotations import has_msgspec_meta, has_pydantic_types
from plait.lang.typed.msgspec_schema import decoder_of, schema_of
from plait.lang.typed.schema_rewriting import close_schema
from plait.runtime.errors import InputError


@dataclass(frozen=True)
class ValueFormat:
    """`spec` holds the text (None: any text will do), `read` makes the value of it and raises ValueError where it
    cannot. `max_text_tokens`: tokens that suffice for the longest text, where there are so few that no limit is needed.
    `allows_truncation`: a text that max_tokens ended can be read too."""

    type_name: str
    spec: Spec | None
    read: Callable[[str], Any]
    max_text_tokens: int | None = None
    allows_truncation: bool = False


_PATTERNS: dict[type, str] = {
    int: patterns.INTEGER,
    float: patterns.NUMBER,
    Decimal: patterns.NUMBER,
    date: patterns.DATE,
    time: patterns.TIME,
    datetime: patterns.DATETIME,
    timedelta: patterns.DURATION,
    UUID: patterns.UUID,
}
_UNSUPPORTED_TYPES = (
    bytes,
    bytearray,
    memoryview,
    complex,
)  # Pydantic's schema of these says too little to be read back


def value_format_of(where: str, type_: Any) -> ValueFormat:
    """The form of `type_`; InputError, beginning with `where`, for a type that has none.

    >>> value_format_of("gen", int).read("42")
    42
    """
    if isinstance(type_, str):
        raise InputError(f"{where}: type takes a type, such as int or a dataclass, not the text {type_!r:.80}")
    if isinstance(type_, list | tuple | dict | set):
        raise InputError(f"{where}: type takes a type, such as list[int] or a dataclass, not {type_!r:.80}")
    try:
        return _cached_value_format(type_)
    except (TypeError, ValueError, RecursionError, NameError) as error:
        raise InputError(f"{where}: values of type {_type_name(type_)} cannot be generated: {error}") from None


def _build_value_format(type_: Any) -> ValueFormat:
    type_name = _type_name(type_)
    if type_ is str:
        return ValueFormat(type_name, None, str)
    if type_ is bool:
        return _one_of(type_name, {"true": True, "false": False})
    if isinstance(type_, type) and type_ in _PATTERNS:
        return ValueFormat(type_name, Regex(_PATTERNS[type_]), _reader_of(type_))
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return _one_of(type_name, {_enum_text(member): member for member in type_})
    if get_origin(type_) is Literal:
        return _one_of(type_name, {_literal_text(value): value for value in get_args(type_)}, len(get_args(type_)))
    schema, read = json_schema_and_parser(type_)
    return ValueFormat(type_name, JsonSchema(schema), read)


_cached_value_format = lru_cache(maxsize=1024)(_build_value_format)


def json_schema_and_parser(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """The schema of `type_` as JSON, and how its text is read. Raises TypeError for a type without one.

    msgspec reads dataclasses, TypedDicts, containers and its own structs; Pydantic reads what msgspec does not
    know, where it is installed: its models, and unions of several classes.
    """
    if has_pydantic_types(type_):
        if has_msgspec_meta(type_):
            raise TypeError("it holds bounds of msgspec.Meta and of Pydantic's; write all of one kind")
        return _by_pydantic(type_)
    try:
        return schema_of(type_), decoder_of(type_)
    except TypeError as error:
        why = str(error).splitlines()[0]
    if has_msgspec_meta(type_):
        raise TypeError(f"{why} (says msgspec, whose Meta it holds; with Pydantic's Field instead it may do)")
    if type_ in _UNSUPPORTED_TYPES or importlib.util.find_spec("pydantic") is None:
        raise TypeError(why)
    try:
        return _by_pydantic(type_)
    except TypeError as error:
        raise TypeError(f"{why}; and Pydantic: {str(error).splitlines()[0]}") from None


def _by_pydantic(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    from plait.lang.typed.pydantic_schema import schema_and_reader  # a package that few programs need

    schema, read = schema_and_reader(type_)
    return close_schema(schema), read


def _one_of(type_name: str, values: dict[str, Any], count: int | None = None) -> ValueFormat:
    if count is not None and len(values) < count:
        raise ValueError("two of its values are written alike")
    try:
        spec = Choices(tuple(values))
    except GrammarError as error:
        raise ValueError(error.reason) from None
    return ValueFormat(type_name, spec, values.__getitem__, max(len(text.encode()) for text in values) + 1)


def _enum_text(member: enum.Enum) -> str:
    """A text value stands for its member; of other values (1, auto()) the name says more."""
    return member.value if isinstance(member.value, str) else member.name


def _literal_text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return _enum_text(value)
    return value if isinstance(value, str) else json.dumps(value)


def _reader_of(type_: type) -> Callable[[str], Any]:
    if type_ in (int, float, Decimal, UUID):
        return type_
    read = decoder_of(type_)
    return lambda text: read(f'"{text}"')


def _type_name(type_: Any) -> str:
    plain = isinstance(type_, type) and not isinstance(type_, types.GenericAlias)
    return str(type_.__name__ if plain else type_)
