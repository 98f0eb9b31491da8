"""Schemas of types: closed objects, keys, integer limits, bounds of msgspec and Pydantic."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
from typed_examples import (
    ByField,
    ByMeta,
    Colour,
    Counts,
    Level,
    Model,
    Person,
    Place,
    Star,
    Town,
)

from plait.constrained import Choices
from plait.lang.partial.annotations import has_pydantic_types
from plait.lang.typed.value_format import value_format_of


def test_plain_types_are_choices_and_objects_are_closed(backend):
    assert value_format_of("gen", bool).spec == Choices(("true", "false"))
    assert value_format_of("gen", Colour).spec == Choices(("red", "deep blue"))
    for type_ in (Person, Model, list[Model], Place):
        schema = json.loads(value_format_of("gen", type_).spec.text)
        objects = [node for node in json_nodes(schema) if isinstance(node, dict) and "properties" in node]
        assert objects and all(node["additionalProperties"] is False for node in objects)


def test_property_may_be_named_like_a_schema_keyword():
    class Odd(pydantic.BaseModel):
        discriminator: int
        format: str
        type: str

    schema = json.loads(value_format_of("gen", Odd).spec.text)
    assert list(schema["properties"]) == ["discriminator", "format", "type"]


def json_nodes(value):
    """`value` and every value inside it."""
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from json_nodes(child)


@pytest.mark.parametrize(
    "type_", [dict[int, int], dict[float, int], dict[Level, int], dict[datetime.date, int], Counts]
)
def test_schema_excludes_keys_that_cannot_be_read_back(type_):
    value_format = value_format_of("gen", type_)
    bad = {"x": 1} if type_ is not Counts else {"by_year": {}, "by_day": {"x": 1}, "flags": {"yes": "y"}}
    assert not jsonschema.Draft202012Validator(json.loads(value_format.spec.text)).is_valid(bad)
    with pytest.raises(ValueError, match=r"key|Input should be|valid"):
        value_format.read(json.dumps(bad))


class Grade(enum.IntEnum):
    GOOD = 1
    BAD = 2


@pytest.mark.parametrize(
    ("key", "written", "value", "other"),
    [
        (Grade, "2", Grade.BAD, "x"),
        (Colour, "red", Colour.RED, "x"),
        (decimal.Decimal, "1.5", decimal.Decimal("1.5"), "x"),
        (Annotated[int, pydantic.AfterValidator(abs)], "-3", 3, "x"),
        (Literal["a", "b"], "b", "b", "x"),
    ],
)
def test_keys_of_a_dict_of_pydantic_models_are_those_that_pydantic_reads(key, written, value, other):
    value_format = value_format_of("gen", dict[key, Star])
    is_valid = jsonschema.Draft202012Validator(json.loads(value_format.spec.text)).is_valid
    assert is_valid({written: {}}) and not is_valid({other: {}})
    assert value_format.read(json.dumps({written: {}})) == {value: Star()}


def test_integers_are_below_2_to_the_53(backend):
    for type_ in (list[int], Town, Model, Counts):
        for node in json_nodes(json.loads(value_format_of("gen", type_).spec.text)):
            if isinstance(node, dict) and node.get("type") == "integer":
                assert -(2**53) < node["minimum"] <= node["maximum"] < 2**53


@pydantic.dataclasses.dataclass
class Validated:
    stars: int = pydantic.Field(ge=1, le=5)

    @pydantic.field_validator("stars")
    @classmethod
    def is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("stars are odd")
        return value


@pytest.mark.parametrize("type_", [ByField, ByMeta, Validated])
def test_dataclass_bounds_of_msgspec_and_pydantic_hold(type_):
    value_format = value_format_of("gen", list[type_])
    is_valid = jsonschema.Draft202012Validator(json.loads(value_format.spec.text)).is_valid
    assert is_valid([{"stars": 5}]) and not is_valid([{"stars": 6}]) and not is_valid([{"stars": 0}])
    assert value_format.read('[{"stars":5}]') == [type_(5)]
    with pytest.raises(ValueError, match="stars"):
        value_format.read('[{"stars":6}]')


@dataclasses.dataclass
class Unbounded:
    names: list[str]
    counts: tuple[int, ...]
    by_name: dict[str, list[int]] | None


@dataclasses.dataclass
class Bounded:
    names: list[str]
    stars: list[Annotated[int, pydantic.Field(ge=1, le=5)]] | None


@dataclasses.dataclass
class Both:
    first: Unbounded
    then: Bounded


def test_pydantic_bounds_are_found_in_nested_dataclasses():
    """Type hints made for the search are freed after it; a later hint may have the id of an earlier one."""
    for _ in range(20):
        assert has_pydantic_types(Both)


def test_validator_of_a_pydantic_dataclass_runs():
    with pytest.raises(ValueError, match="stars are odd"):
        value_format_of("gen", Validated).read('{"stars":2}')
