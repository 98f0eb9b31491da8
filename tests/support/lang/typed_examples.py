"""Types that typed-value tests generate: dataclasses, enums, TypedDict, NamedTuple, msgspec and Pydantic models."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import pydantic

import plait
from plait import gen


class Colour(enum.Enum):
    RED = "red"
    BLUE = "deep blue"


class Level(enum.Enum):
    LOW = enum.auto()
    HIGH = enum.auto()


@dataclasses.dataclass
class Pet:
    name: str
    kind: Literal["cat", "dog"]


@dataclasses.dataclass
class Person:
    name: str
    age: int
    born: datetime.date
    pets: list[Pet]
    nick: str | None = None


@dataclasses.dataclass
class Town:
    height: int


class Place(TypedDict):
    town: str
    height: NotRequired[float]


class Point(NamedTuple):
    x: int
    y: int


class Tree(msgspec.Struct):
    value: int
    children: list[Tree] = []


class Model(pydantic.BaseModel):
    title: str
    stars: Annotated[int, pydantic.Field(ge=1, le=5)]
    when: datetime.datetime

    @pydantic.field_validator("title")
    @classmethod
    def not_in_capitals(cls, value: str) -> str:
        if value.isupper():
            raise ValueError("a title is not in capitals")
        return value


class Counts(pydantic.BaseModel):
    by_year: dict[int, int]
    by_day: dict[datetime.date, int]
    flags: dict[bool, str]


PERSON = '{"name":"Ada","age":36,"born":"1815-12-10","pets":[{"name":"Tom","kind":"cat"}]}'


@dataclasses.dataclass
class ByField:
    stars: Annotated[int, pydantic.Field(ge=1, le=5)]


@dataclasses.dataclass
class ByMeta:
    stars: Annotated[int, msgspec.Meta(ge=1, le=5)]


@plait.function
def ask(s, type_, **keywords):
    s += "Q: " + gen("value", type=type_, **keywords)


class Star(pydantic.BaseModel):
    name: str = "Sol"


class Mark(enum.Enum):
    NAME = "a b"
    NUMBER = 7
    FRACTION = 2.5
    NOTHING = None


class Starred(pydantic.BaseModel):
    mark: Mark
