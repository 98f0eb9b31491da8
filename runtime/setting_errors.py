"""Converts keyword settings to a struct. An error names the setting, what it may be, and the wrong value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as types

from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)


def convert_settings(kind: str, settings: Mapping[str, Any], struct: type[T], renamed: Mapping[str, str]) -> T:
    """Returns `settings` as a struct. Raises InputError whose `field` is the first wrong setting.

    `kind` is the word for messages, such as "runtime". `renamed`: names that other programs use -> ours.
    """
    known = struct.__struct_fields__
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        name = unknown[0]
        hint = f" (write {renamed[name]})" if name in renamed else did_you_mean(name, known)
        raise InputError(f"unknown {kind} setting {name!r}{hint}; known are: {', '.join(known)}", field=name)
    try:
        return msgspec.convert(dict(settings), struct)
    except msgspec.ValidationError as error:
        for field in types.type_info(struct).fields:  # type: ignore[attr-defined]
            if field.name in settings:
                _check(struct, field.name, field.type, settings[field.name])
        raise InputError(f"a {kind} setting is invalid: {error}") from None


def _check(struct: type[msgspec.Struct], name: str, kind: types.Type, value: Any) -> None:
    try:
        msgspec.convert({name: value}, struct)
    except msgspec.ValidationError as error:
        expected = _expected(kind)
        hint = ""
        if isinstance(kind, types.LiteralType) and isinstance(value, str):
            hint = did_you_mean(value, map(str, kind.values))
        text = f"{name}: {error}" if expected is None else f"{name} must be {expected}, not {value!r:.80}{hint}"
        raise InputError(text, field=name) from None


def _expected(kind: types.Type) -> str | None:
    """Returns the values of a type in words, or None for a type that has none here.

    >>> _expected(types.IntType(ge=0, le=65535)), _expected(types.LiteralType(("auto", "plait", "transformers")))
    ('an integer from 0 to 65535', 'auto, plait or transformers')
    """
    if isinstance(kind, types.Metadata):
        return (kind.extra_json_schema or {}).get("description") or _expected(kind.type)
    if isinstance(kind, types.UnionType):  # None is the default wherever it is a value
        others = [_expected(one) for one in kind.types if not isinstance(one, types.NoneType)]
        return others[0] if len(others) == 1 else None
    if isinstance(kind, types.LiteralType):
        return _any_of(kind.values)
    if isinstance(kind, types.IntType | types.FloatType):
        return ("an integer" if isinstance(kind, types.IntType) else "a number") + _range(kind)
    if isinstance(kind, types.BoolType):
        return "True or False"
    if isinstance(kind, types.StrType):
        return "text"
    if isinstance(kind, types.VarTupleType):
        item = _expected(kind.item_type)
        return None if item is None else f"a list, with items that are {item}"
    if isinstance(kind, types.DictType):
        item = _expected(kind.value_type)
        return None if item is None else f"a dict, with values that are {item}"
    return None


def _any_of(values: Iterable[Any]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def _range(kind: types.IntType | types.FloatType) -> str:
    """The settings here have a lower limit and an upper one, or none."""
    if kind.le is None:
        return ""
    return f" above {kind.gt:g}, up to {kind.le}" if kind.ge is None else f" from {kind.ge:g} to {kind.le}"
