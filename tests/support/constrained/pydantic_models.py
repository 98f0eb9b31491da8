"""Realistic Pydantic models, and the schemas that Pydantic generates for them."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field


class Level(StrEnum):
    LOW = "low"
    HIGH = "high"


class Point(BaseModel):
    x: float
    y: float = 0.0


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=80)
    age: int | None = Field(default=None, ge=0, lt=150)
    born: date | None = None


class Team(BaseModel):
    lead: Person
    members: list[Person] = Field(default_factory=list, max_length=10)
    level: Level = Level.LOW


class Node(BaseModel):
    value: int
    next: Node | None = None


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Undiscriminated(BaseModel):
    pet: Cat | Dog | str


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    code: str = Field(pattern=r"^[A-Z]{3}-\d{4}$")
    ratio: float = Field(gt=0, le=1)


class Times(BaseModel):
    at: datetime
    day: date
    clock: time
    lasting: timedelta


class Web(BaseModel):
    id: UUID
    site: AnyUrl
    host: IPv4Address


class Money(BaseModel):
    amount: Decimal
    cents: int = Field(multiple_of=5)


class Containers(BaseModel):
    pair: tuple[int, str]
    counts: dict[str, int]
    names: set[str] = set()
    nested: dict[str, list[Point]] = {}


class FewColors(BaseModel):
    colors: set[Literal["red", "green", "blue"]]


class Loose(BaseModel):
    data: Any
    extra: dict[str, Any] = {}


class Aliased(BaseModel):
    from_: str = Field(alias="from", title="Sender", examples=["me"])


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Bytes(BaseModel):
    blob: bytes


class Flags(BaseModel):
    flags: dict[Level, bool]
    either: int | str | None = None
    pick: Literal["a", 1, None] = "a"


MODELS: list[type[BaseModel]] = [Point, Person, Team, Node, Tree, Owner, Undiscriminated, Strict, Times, Web, Money]
MODELS += [Containers, FewColors, Loose, Aliased, Reasoning, Bytes, Flags]
PYDANTIC: dict[str, dict[str, Any]] = {f"pydantic/{model.__name__}": model.model_json_schema() for model in MODELS}
