"""Types that cannot be generated, and arguments that cannot be combined with a type."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import re
from typing import Annotated, Literal

import msgspec
import pydantic
import pytest
from typed_examples import (
    ByField,
    ByMeta,
    Colour,
    Level,
    Mark,
    Pet,
    Star,
    Town,
)

import plait
from plait import gen
from plait.lang.typed.value_format import value_format_of


@pytest.mark.parametrize("key", [None, int | None, Literal["a", 1], Annotated[int, pydantic.Field(ge=1)], bytes, Star])
def test_key_types_without_a_schema_are_refused_in_a_dict_of_pydantic_models(key):
    with pytest.raises(plait.InputError, match="cannot be generated"):
        value_format_of("gen", dict[key, Star])


@dataclasses.dataclass
class Mixed:
    one: ByField
    other: ByMeta


@dataclasses.dataclass
class Unresolved:
    place: Nowhere  # noqa: F821


class Wrapped(pydantic.BaseModel):
    data: bytes


@pytest.mark.parametrize(
    ("type_", "reason"),
    [
        ("int", "type takes a type, such as int or a dataclass, not the text 'int'"),
        (bytes, "values of type bytes cannot be generated: Bytes values"),
        (Wrapped, "bytes cannot be written as JSON"),
        (type, "values of type type cannot be generated"),
        (collections.abc.Callable, "cannot be generated"),
        (dict[bytes, int], "cannot be generated"),
        (dict[tuple[int, int], int], "keys of a dict must be text or numbers, not Tuple values"),
        (dict[Literal["a", None], int], "keys of a dict must be text or numbers, not None"),
        (dict[Annotated[int, msgspec.Meta(ge=5)], int], "number keys of a dict cannot have bounds"),
        (Mixed, "bounds of both msgspec.Meta and Pydantic"),
        (ByMeta | Town, "Pydantic's Field instead may work"),
        (list[Literal[()]], "cannot be generated"),
        (Unresolved, "name 'Nowhere' is not defined"),
        (Pet("Tom", "cat"), "write type=Pet, not an object of it"),
    ],
    ids=str,
)
def test_unsupported_type_is_an_input_error_of_gen(type_, reason):
    with pytest.raises(plait.InputError, match=re.escape(reason)):
        gen("x", type=type_)


class Pair(enum.Enum):
    ONE = (1, 2)


@pytest.mark.parametrize(
    ("type_", "reason"),
    [
        (dict[Mark, int], "the keys of a dict must be text, or numbers without bounds"),
        (dict[Level, Mark], "the keys of a dict must be text, or numbers without bounds"),
        (dict[str, Pair], "Pair has members that are not text"),
        (list[Literal[Colour.RED]], "a Literal inside another type cannot contain Colour.RED; use Colour"),
        (list[Literal[Mark.NUMBER, "z"]], "cannot contain Mark.NUMBER"),
    ],
    ids=str,
)
def test_type_whose_values_cannot_be_read_back_is_refused(type_, reason):
    with pytest.raises(plait.InputError, match=re.escape(reason)):
        value_format_of("gen", type_)


class Plain:
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gen("x", type=Plain), r"gen\('x'\): values of type Plain cannot be generated"),
        (lambda: gen("x", type=list[Plain]), "cannot be generated"),
        (lambda: gen("x", type=Literal["1", 1]), "two of its values have the same text"),
        (lambda: gen("x", type=Literal[""]), "a choice is empty"),
        (lambda: gen("x", type=int, regex="[0-9]"), "type cannot be combined with"),
        (lambda: gen("x", type=int, choices=["1"]), "type cannot be combined with"),
        (lambda: gen("x", type=int, stop="\n"), "stop has no effect with type=int"),
        (lambda: gen("x", type=int, temprature=1), "did you mean 'temperature'"),
        (lambda: gen("x", typ=int), "did you mean 'type'"),
    ],
)
def test_unsupported_type_or_combination_names_the_argument(make, message):
    with pytest.raises(plait.InputError, match=message):
        make()
