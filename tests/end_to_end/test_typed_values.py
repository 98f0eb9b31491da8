"""`gen(type=...)` on the embedded model: every sampled value is an instance of the type."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Annotated, Literal, NamedTuple

import msgspec
import pydantic
import pytest
from typing_extensions import TypedDict

import plait
from plait import assistant, gen, user


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "very large"


@dataclasses.dataclass
class Visit:
    day: datetime.date
    at: datetime.datetime
    cost: float
    size: Size


class Review(pydantic.BaseModel):
    stars: Annotated[int, pydantic.Field(ge=1, le=5)]
    visits: Annotated[list[Visit], pydantic.Field(max_length=2)]
    mood: Literal["good", "bad"] | None = None


@plait.function
def ask(s, type_, max_tokens):
    s += user("Describe your last visit to a museum.")
    s += assistant(gen("value", type=type_, max_tokens=max_tokens))


@pytest.mark.parametrize(
    "type_", [int, float, bool, Size, datetime.date, datetime.datetime, Visit, Review, list[Visit], dict[str, int]]
)
def test_sampled_values_are_instances_of_the_type(runtime, type_):
    runs = [ask.run(type_, 200, temperature=temperature, seed=3, backend=runtime) for temperature in (0.0, 1.5)]
    for run in runs:
        value = run["value"]
        if isinstance(type_, type) and not hasattr(type_, "__origin__"):
            assert type(value) is type_
        else:
            assert isinstance(value, (list, dict))


class Mark(enum.Enum):
    """Values of several types, which msgspec does not decode."""

    NAME = "very good"
    NUMBER = 7
    NOTHING = None


class Place(NamedTuple):
    floor: Literal[1, 2, "roof"]
    mark: Mark


class Note(TypedDict):
    day: datetime.date
    sizes: Annotated[list[Size], msgspec.Meta(max_length=2)]


@dataclasses.dataclass
class Room:
    place: Place
    is_open: bool


class Tour(pydantic.BaseModel):
    rooms: Annotated[list[Room], pydantic.Field(min_length=1, max_length=2)]
    marks: Annotated[dict[Size, Mark], pydantic.Field(max_length=2)]


NESTED = [
    *(Place, Note, Room, Tour, Place | None, tuple[Mark, int], list[Mark] | None),
    *(dict[Size, Place], tuple[Literal["a", 1, None], Mark], Room | int),
]


@pytest.mark.parametrize("type_", NESTED, ids=str)
def test_nested_types_with_mixed_values(runtime, type_):
    state = ask.run(type_, 120, temperature=1.0, seed=5, backend=runtime)
    assert pydantic.TypeAdapter(type_).validate_python(state["value"]) == state["value"]
