"""Partial values: for every prefix of a valid JSON text, the value is a prefix of the complete one, and only grows."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from typing import Annotated, Any, Generic, Literal, NotRequired, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_types import NESTED
from typed_examples import Tree

from plait import partial_json, partial_value
from plait.lang.partial.values import ABSENT, _Builder
from plait.lang.typed.value_format import json_schema_and_parser
from plait.runtime.client.partial_json import parse_partial_json

T = TypeVar("T")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def is_prefix(part: Any, value: Any) -> bool:
    """Whether `part` is what is there so far of `value`. None stands for nothing."""
    if part is None or part is ABSENT:
        return True
    if type(part) is not type(value):
        return False
    if isinstance(part, str) and not isinstance(part, enum.Enum):
        return value.startswith(part)
    if isinstance(part, dict):
        keys = list(part)
        return keys == list(value)[: len(keys)] and all(is_prefix(part[key], value[key]) for key in keys)
    if isinstance(part, set):
        return part <= value
    if isinstance(part, list | tuple):
        return len(part) <= len(value) and all(map(is_prefix, part, value))
    if dataclasses.is_dataclass(part) or isinstance(part, pydantic.BaseModel | msgspec.Struct):
        names = getattr(part, "__dataclass_fields__", None) or getattr(type(part), "model_fields", None)
        names = part.__struct_fields__ if names is None else names
        return all(is_prefix(getattr(part, name), getattr(value, name)) for name in names)
    return part == value


def partial_values(type_: Any, text: str) -> list[Any]:
    """The partial values of all prefixes of a text, ABSENT where nothing is there."""
    values = []
    for end in range(len(text) + 1):
        part = parse_partial_json(text[:end])
        values.append(ABSENT if part is None else _Builder(text[:end]).build(type_, part))
    return values


def assert_grows(values: list[Any], final: Any) -> None:
    for earlier, later in zip(values, [*values[1:], final], strict=True):
        assert is_prefix(earlier, later), (earlier, later)
    assert values[-1] == final and type(values[-1]) is type(final)


@settings(max_examples=150, deadline=None)
@given(JSON, st.booleans(), st.sampled_from([None, 1]))
def test_data_of_every_prefix_grows_to_the_complete_data(value, ascii_only, indent):
    text = json.dumps([value], ensure_ascii=ascii_only, indent=indent)
    values = [partial_json(text[:end]) for end in range(len(text) + 1)]
    assert_grows(values, json.loads(text))


@settings(max_examples=150, deadline=None)
@given(NESTED, st.data())
def test_values_of_every_prefix_grow_to_the_complete_value(nested, data):
    type_, values = nested
    _, written = data.draw(values)
    text = json.dumps([written])
    final = json_schema_and_parser(list[type_])[1](text)
    assert_grows(partial_values(list[type_], text), final)


@settings(max_examples=100, deadline=None)
@given(st.text('{}[]",:\\u0a9tfn1-.e ', max_size=12))
def test_text_that_json_reads_is_read_and_its_prefixes_too(text):
    if is_json(text):
        assert parse_partial_json(text, is_complete=True).data() == json.loads(text)
        for end in range(len(text)):
            partial_json(text[:end])
    elif is_refused(text):
        assert not any(is_json(text + rest) for rest in ("", "1", '"', "]", "}", "1]", "1}", "e", "}]"))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_refused(text: str) -> bool:
    try:
        partial_json(text)
    except ValueError:
        return True
    return False


class Address(pydantic.BaseModel):
    street: str
    since: datetime.date


class Person(pydantic.BaseModel):
    full_name: str = pydantic.Field(alias="fullName")
    address: Address | None = None
    friends: list[Person] = []
    level: Literal["low", "high"] = "low"

    @pydantic.field_validator("full_name")
    @classmethod
    def two_words(cls, value: str) -> str:
        if " " not in value:
            raise ValueError("two words")
        return value


def test_fields_are_of_their_types_as_far_as_they_are():
    text = (
        '{"fullName": "Ada L", "address": {"street": "Dorset St", "since": "1840-01-02"}, "friends": [{"fullName": "M'
    )
    person = partial_value(Person, text)
    assert type(person) is Person and person.full_name == "Ada L" and person.level is None
    assert person.address == Address(street="Dorset St", since=datetime.date(1840, 1, 2))
    assert type(person.friends[0]) is Person and person.friends[0].full_name == "M"
    earlier = partial_value(Person, text[: text.index("02")])
    assert earlier.address.street == "Dorset St" and earlier.address.since is None and earlier.friends is None
    assert partial_value(Person, '{"fullName": "A"').full_name == "A", "a validator sees complete objects only"
    assert partial_value(Person, "") is None and partial_value(Person, "  ") is None
    assert "full_name='Ada L'" in repr(person)
    refused = partial_value(Person, '{"fullName": "A"}')
    assert refused.full_name == "A" and refused.level is None, "what a validator refuses is shown; a read raises"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen(Generic[T]):
    number: int
    items: list[T]

    def __post_init__(self) -> None:
        if self.number is None:
            raise TypeError("runs on complete values only")


class Named(msgspec.Struct, frozen=True, rename="camel"):
    first_name: str
    age: int = 3


class Checked(msgspec.Struct):
    name: str

    def __post_init__(self) -> None:
        assert self.name.isupper()


class Cat(msgspec.Struct, tag="cat"):
    lives: list[int]


class Dog(msgspec.Struct, tag="dog"):
    tricks: list[str]


class Pair(msgspec.Struct, array_like=True):
    a: int
    b: str


class Place(TypedDict):
    town: str
    height: NotRequired[float]


class Car(pydantic.BaseModel):
    kind: Literal["car"]
    wheels: list[int]


class Boat(pydantic.BaseModel):
    kind: Literal["boat"]
    sails: list[str]


class Names(pydantic.RootModel[list[str]]):
    pass


@pytest.mark.parametrize(
    ("type_", "text", "expected"),
    [
        (Frozen[str], '{"items": ["a", "b', (None, ["a", "b"])),
        (Named, '{"firstName": "A', (("A", None))),
        (Named, '{"firstName": "A"}', (("A", 3))),
        (Tree, '{"value": 1, "children": [{"value": 2, "chi', (1, [(2, None)])),
        (Checked, '{"name": "A', None),
        (Cat | Dog, '{"type": "dog", "tricks": ["sit', (["sit"],)),
        (Cat | Dog, '{"type": "d', None),
        (Pair, '[1, "x', (1, "x")),
        (Place, '{"town": "Ulm", "height": 4', {"town": "Ulm"}),
        (Car | Boat, '{"kind": "boat", "sails": ["ma', ("boat", ["ma"])),
        (Car | Boat, '{"kind": "b', None),
        (Names, '["a", "b', (["a", "b"],)),
        (Annotated[list[str], pydantic.Field(min_length=3)], '["a', ["a"]),
        (dict[int, list[int]], '{"1": [2, 3', {1: [2]}),
        (tuple[int, str, int], '[1, "b', (1, "b")),
        (tuple[str, ...], '["a", "b', ("a", "b")),
        (set[str], '["a", "b', {"a"}),
        (list[str | int], '[1, "b', [1, "b"]),
        (list[datetime.date | int], '["2020-01', []),
        (Any, '{"a": [true, fal', {"a": [True]}),
    ],
)
def test_kinds_of_types(type_, text, expected):
    value = partial_value(type_, text)
    assert fields(value) == expected


def fields(value: Any) -> Any:
    """Objects as tuples of their fields."""
    if isinstance(value, pydantic.BaseModel):
        return tuple(fields(item) for item in value.__dict__.values())
    if isinstance(value, msgspec.Struct):
        return tuple(fields(getattr(value, name)) for name in value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return tuple(fields(getattr(value, field.name)) for field in dataclasses.fields(value))
    return [fields(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", ['{"a" 1', "[1 2", "x", "[,", '"\\x', "01", '{"a": 1} x', "[" * 300])
def test_text_that_begins_no_json_is_refused(text):
    with pytest.raises(ValueError, match=r"this is not JSON|nested deeper"):
        partial_json(text)


def test_half_of_a_character_is_left_out():
    text = json.dumps(["a😀b"])
    assert {partial_json(text[:end])[0] for end in range(2, len(text))} == {"", "a", "a😀", "a😀b"}
