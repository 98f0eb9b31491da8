"""`value_format_of(type)`: the constraint under which values of a Python type are generated, and their parser.

Plain types are written as plain text (42, 2024-05-01, a value of an enum); all other types are written as JSON.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin
from uuid import UUID

from plait.constrained.specs import Choices, GrammarError, JsonSchema, Regex, Spec
from plait.lang.partial.annotations import has_msgspec_meta, has_pydantic_types
from plait.lang.typed import patterns
from plait.lang.typed.msgspec_schema import decoder_of, schema_of
from plait.lang.typed.schema_rewriting import close_schema
from plait.runtime.errors import InputError


@dataclass(frozen=True)
class ValueFormat:
    """How values of a type are generated and parsed.

    `spec`: the constraint (None: any text). `read`: parses the text; raises ValueError for an invalid one.
    `max_text_tokens`: an upper bound on the tokens of the longest text, for types whose texts are short; it then
    replaces max_tokens. `allows_truncation`: a text that max_tokens cut off can be parsed too. `read_partial`: parses
    the beginning of a text; None: there is no partial value.
    """

    type_name: str
    spec: Spec | None
    read: Callable[[str], Any]
    max_text_tokens: int | None = None
    allows_truncation: bool = False
    read_partial: Callable[[str], Any] | None = field(default=None, kw_only=True)

    def read_result(self, text: str, finish_reason: str) -> Any:
        """Returns the value of a finished gen. Raises RefusedValue if its text is not one."""
        if finish_reason == "length" and self.spec is not None and not self.allows_truncation:
            raise RefusedValue(
                f"max_tokens cut the {self.type_name} off after {text[-40:]!r}; "
                "raise max_tokens, or do not set complete=False"
            )
        try:
            return self.read(text)
        except (ValueError, TypeError, ArithmeticError, KeyError) as error:
            raise RefusedValue(f"{text!r:.80} cannot be read as {self.type_name}: {error}") from error


class RefusedValue(ValueError):
    """A text is not a value of its type. The message is the reason; `__cause__` is the error of the parser, if any."""

    @property
    def short_reason(self) -> str:
        """The reason without the text: of a parser's error its message, of a Pydantic error one `field: message` a
        line."""
        errors = getattr(self.__cause__, "errors", None)
        if not callable(errors):
            return str(self if self.__cause__ is None else self.__cause__)
        places = [(".".join(map(str, error["loc"])), error["msg"]) for error in errors()]
        return "\n".join(f"{place}: {message}" if place else message for place, message in places)


_TYPE_MODULES = ("typing", "types", "pydantic", "annotated_types", "msgspec")

_PATTERNS: dict[type, str] = {
    int: patterns.INTEGER,
    float: patterns.NUMBER,
    Decimal: patterns.NUMBER,
    date: patterns.DATE,
    time: patterns.TIME,
    datetime: patterns.DATETIME,
    timedelta: patterns.DURATION,
    UUID: patterns.UUID,
    complex: patterns.COMPLEX,
}
_UNSUPPORTED = (NameError, TypeError, ValueError, RecursionError)  # what the schema of a type raises
_UNSUPPORTED_TYPES = (bytes, bytearray, memoryview)  # Pydantic's schema of these allows unreadable values


def value_format_of(where: str, type_: Any) -> ValueFormat:
    """Returns the format of `type_`. Raises InputError, beginning with `where`, for an unsupported type.

    >>> value_format_of("gen", int).read("42")
    42
    """
    if isinstance(type_, str):
        raise InputError(f"{where}: type takes a type, such as int or a dataclass, not the text {type_!r:.80}")
    if isinstance(type_, list | tuple | dict | set):
        raise InputError(f"{where}: type takes a type, such as list[int] or a dataclass, not {type_!r:.80}")
    if hasattr(type(type_), "model_fields") or (hasattr(type(type_), "__dataclass_fields__") and _is_user_value(type_)):
        raise InputError(f"{where}: type takes a type: write type={type(type_).__name__}, not an object of it")
    try:
        return _cached_value_format(type_)
    except _UNSUPPORTED as error:
        raise _unsupported(where, type_, error) from None


def _is_user_value(type_: Any) -> bool:
    """Whether `type_` is an object of a data class, and not a type that its library describes by such objects."""
    return not isinstance(type_, type) and type(type_).__module__.split(".")[0] not in _TYPE_MODULES


def _unsupported(where: str, type_: Any, error: Exception) -> InputError:
    hint = "; a type that names itself or others in quotes is defined at the top level of a module"
    reason = f"{error}{hint * isinstance(error, NameError)}"
    return InputError(f"{where}: values of type {_type_name(type_)} cannot be generated: {reason}")


def _build_value_format(type_: Any) -> ValueFormat:
    type_name = _type_name(type_)
    if type_ is str:
        return ValueFormat(type_name, None, str, read_partial=str)
    if type_ is bool:
        return _one_of(type_name, {"true": True, "false": False})
    if isinstance(type_, type) and type_ in _PATTERNS:
        return ValueFormat(type_name, Regex(_PATTERNS[type_]), _reader_of(type_))
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return _one_of(type_name, {_enum_text(member): member for member in type_})
    if get_origin(type_) is Literal:
        return _one_of(type_name, {literal_text(value): value for value in get_args(type_)}, len(get_args(type_)))
    schema, read = json_schema_and_parser(type_)
    return ValueFormat(type_name, JsonSchema(schema), read, read_partial=lambda text: _read_partial(type_, text))


def _read_partial(type_: Any, text: str) -> Any:
    from plait.lang.partial.values import partial_value  # lazy: few programs need it

    return partial_value(type_, text)


_cached_value_format = lru_cache(maxsize=1024)(_build_value_format)


def json_value_format(where: str, type_: Any, spec: Spec | None) -> ValueFormat:
    """Returns the format of a value that is written as JSON, whatever its type; of a text that is valid for `spec`, if
    that is given. Raises InputError, beginning with `where`, for both, and for what is not JSON."""
    if spec is not None:
        if type_ is not None or not isinstance(spec, JsonSchema):
            raise InputError(f"{where}: beside tools, give type or json_schema; other constraints have no JSON value")
        return ValueFormat("a JSON value", spec, str)
    try:
        schema, read = json_schema_and_parser(type_)
        return ValueFormat(_type_name(type_), JsonSchema(schema), read)
    except _UNSUPPORTED as error:
        raise _unsupported(where, type_, error) from None


def json_schema_and_parser(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Returns the JSON schema of `type_` and a parser of its JSON text. Raises TypeError for an unsupported type.

    msgspec handles dataclasses, TypedDicts, containers and its own structs. Pydantic, if it is installed, handles its
    models and the types that msgspec does not support, such as unions of several classes.
    """
    if has_pydantic_types(type_):
        if has_msgspec_meta(type_):
            raise TypeError("it has bounds of both msgspec.Meta and Pydantic; use only one of the two")
        return _by_pydantic(type_)
    try:
        return schema_of(type_), decoder_of(type_)
    except TypeError as error:
        reason = str(error).splitlines()[0]
    if has_msgspec_meta(type_):
        raise TypeError(f"{reason} (from msgspec, whose Meta it uses; Pydantic's Field instead may work)")
    if type_ in _UNSUPPORTED_TYPES or importlib.util.find_spec("pydantic") is None:
        raise TypeError(reason)
    try:
        return _by_pydantic(type_)
    except TypeError as error:
        raise TypeError(f"{reason}; and Pydantic: {str(error).splitlines()[0]}") from None


def _by_pydantic(type_: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    from plait.lang.typed.pydantic_schema import schema_and_reader  # lazy: Pydantic is optional

    schema, read = schema_and_reader(type_)
    return close_schema(schema), read


def _one_of(type_name: str, values: dict[str, Any], count: int | None = None) -> ValueFormat:
    if count is not None and len(values) < count:
        raise ValueError("two of its values have the same text")
    try:
        spec = Choices(tuple(values))
    except GrammarError as error:
        raise ValueError(error.reason) from None
    return ValueFormat(type_name, spec, values.__getitem__, max(len(text.encode()) for text in values) + 1)


def _enum_text(member: enum.Enum) -> str:
    """Returns the text of an enum member: its value if that is text, otherwise its name."""
    return member.value if isinstance(member.value, str) else member.name


def literal_text(value: Any) -> str:
    """Returns the text of a member of an Enum or a Literal, as a choice. Raises TypeError for other values."""
    if isinstance(value, enum.Enum):
        return _enum_text(value)
    return value if isinstance(value, str) else json.dumps(value)


def _reader_of(type_: type) -> Callable[[str], Any]:
    if type_ in (int, float, Decimal, UUID, complex):
        return type_
    read = decoder_of(type_)
    return lambda text: read(f'"{text}"')


def _type_name(type_: Any) -> str:
    plain = isinstance(type_, type) and not isinstance(type_, types.GenericAlias)
    return str(type_.__name__ if plain else type_)
