"""Programs whose items have values of every kind, for the tests of `run_batch(resume=)`."""

from __future__ import annotations

import dataclasses
import enum
from datetime import date
from typing import Literal, NamedTuple

import msgspec
import pydantic

import plait
from plait import assistant, gen, select, user


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Address(pydantic.BaseModel):
    city: str
    tags: list[str] = []


class Person(pydantic.BaseModel):
    name: str
    address: Address | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    kind: Literal["a", "b"]


class Struct(msgspec.Struct):
    day: date
    point: Point


class Pair(NamedTuple):
    first: int
    second: str


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@plait.function
def every_kind(s, question):
    s += user(question)
    with s.var_scope("turn"):
        s += assistant(
            gen("person", type=Person) + " is " + select("mood", ["calm", "lively"]) + " in " + select("tint", Colour)
        )
    person = s["person"]
    s["seen"] = {"pair": Pair(1, "b"), "colours": {Colour.RED}, 3: (1.5, float("inf"), b"x"), "day": date(2024, 5, 1)}
    branches = s.fork(2)
    branches += user("More?") + assistant(gen("point", type=Point, return_logprob=True, top_logprobs_num=2))
    inner = branches[0].fork(2)
    inner += gen("leaf")
    inner.join()
    branches.join()
    s += user("And?") + assistant(gen("two", n=2, stop="!"))
    s += user("Call.") + assistant(gen("call", tools=[add]))
    s += user("Colour?") + assistant(
        gen("colour", type=Colour) + gen("cut", type=list[int], complete=False, max_tokens=2)
    )
    return person, s["point"], Struct(date(2024, 1, 2), Point(1, "a"))
