"""Typed values: what is generated is held to the type, and read back as it."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import enum
import itertools
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plait
from plait import gen
from plait.constrained import Choices, JsonSchema, Regex
from plait.lang.typed import patterns
from plait.lang.typed.annotations import has_pydantic_types
from plait.lang.typed.value_format import value_format_of
from plait.runtime.messages import Generate

ROOT = Path(__file__).parents[3]


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
    def no_shouting(cls, value: str) -> str:
        if value.isupper():
            raise ValueError("a title does not shout")
        return value


class Counts(pydantic.BaseModel):
    by_year: dict[int, int]
    by_day: dict[datetime.date, int]
    flags: dict[bool, str]


UTC = datetime.UTC
PERSON = '{"name":"Ada","age":36,"born":"1815-12-10","pets":[{"name":"Tom","kind":"cat"}]}'
CASES: list[tuple[Any, str, Any]] = [
    (int, "-42", -42),
    (float, "2.5", 2.5),
    (bool, "false", False),
    (str, "any text", "any text"),
    (decimal.Decimal, "1.10", decimal.Decimal("1.10")),
    (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
    (datetime.time, "23:59:01", datetime.time(23, 59, 1)),
    (datetime.datetime, "2024-05-01T12:30:00Z", datetime.datetime(2024, 5, 1, 12, 30, tzinfo=UTC)),
    (datetime.timedelta, "PT90M", datetime.timedelta(minutes=90)),
    (uuid.UUID, "12345678-1234-1234-1234-123456789abc", uuid.UUID("12345678-1234-1234-1234-123456789abc")),
    (Colour, "deep blue", Colour.BLUE),
    (Level, "HIGH", Level.HIGH),
    (Literal["a", "b"], "b", "b"),
    (Literal["a", 2, None, True], "2", 2),
    (Literal["a", 2, None, True], "true", True),
    (int | None, "null", None),
    (list[int], "[1,2]", [1, 2]),
    (tuple[int, str], '[1,"x"]', (1, "x")),
    (dict[str, float], '{"a":1.5}', {"a": 1.5}),
    (dict[Colour, int], '{"red":1}', {Colour.RED: 1}),
    (dict[int, bool], '{"-3":true}', {-3: True}),
    (dict[float, int], '{"2.5":1}', {2.5: 1}),
    (dict[Level, int], '{"2":1}', {Level.HIGH: 1}),
    (dict[Literal[1, 2], str], '{"2":"x"}', {2: "x"}),
    (dict[datetime.date, int], '{"2024-02-29":1}', {datetime.date(2024, 2, 29): 1}),
    (Counts, '{"by_year":{"1999":1},"by_day":{},"flags":{}}', Counts(by_year={1999: 1}, by_day={}, flags={})),
    (Annotated[int, msgspec.Meta(ge=0, le=9)], "7", 7),
    (Person, PERSON, Person("Ada", 36, datetime.date(1815, 12, 10), [Pet("Tom", "cat")])),
    (list[Pet] | None, '[{"name":"T","kind":"dog"}]', [Pet("T", "dog")]),
    (Place, '{"town":"Ulm"}', {"town": "Ulm"}),
    (Point, "[1,2]", Point(1, 2)),
    (Tree, '{"value":1,"children":[{"value":2}]}', Tree(1, [Tree(2)])),
    (Pet | Town, '{"height":478}', Town(478)),
    (
        Model,
        '{"title":"It","stars":3,"when":"2024-05-01T12:30:00Z"}',
        Model(title="It", stars=3, when=datetime.datetime(2024, 5, 1, 12, 30, tzinfo=UTC)),
    ),
    (
        dict[str, list[Model]],
        '{"a":[{"title":"It","stars":3,"when":"2024-05-01T12:30:00Z"}]}',
        {"a": [Model(title="It", stars=3, when=datetime.datetime(2024, 5, 1, 12, 30, tzinfo=UTC))]},
    ),
]


@plait.function
def ask(s, type_, **keywords):
    s += "Q: " + gen("value", type=type_, **keywords)


@pytest.mark.parametrize(("type_", "text", "value"), CASES, ids=lambda each: str(each)[:30])
def test_the_value_is_of_the_type(backend, type_, text, value):
    backend.script(default=text)
    state = ask.run(type_)
    assert state["value"] == value and type(state["value"]) is type(value)
    assert state["value"] is state["value"], "the text is read once"
    assert state.text_of("value") == text and state.text() == "Q: " + text
    constraint = backend.scheduler.sent(Generate)[0].constraint
    match constraint:
        case Choices(choices):
            assert text in choices
        case Regex(pattern):
            assert re.fullmatch(pattern, text)
        case JsonSchema():
            jsonschema.Draft202012Validator(json.loads(constraint.text)).validate(json.loads(text))
        case None:
            assert type_ is str


def test_plain_types_are_written_plainly_and_objects_are_closed(backend):
    assert value_format_of("gen", bool).spec == Choices(("true", "false"))
    assert value_format_of("gen", Colour).spec == Choices(("red", "deep blue"))
    for type_ in (Person, Model, list[Model], Place):
        schema = json.loads(value_format_of("gen", type_).spec.text)
        objects = [each for each in nodes(schema) if isinstance(each, dict) and "properties" in each]
        assert objects and all(each["additionalProperties"] is False for each in objects)


def test_a_property_may_have_a_keywords_name():
    class Odd(pydantic.BaseModel):
        discriminator: int
        format: str
        type: str

    schema = json.loads(value_format_of("gen", Odd).spec.text)
    assert list(schema["properties"]) == ["discriminator", "format", "type"]


def nodes(value):
    yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(each)


@pytest.mark.parametrize(
    "type_", [dict[int, int], dict[float, int], dict[Level, int], dict[datetime.date, int], Counts]
)
def test_keys_that_could_not_be_read_back_are_not_in_the_schema(type_):
    form = value_format_of("gen", type_)
    bad = {"x": 1} if type_ is not Counts else {"by_year": {}, "by_day": {"x": 1}, "flags": {"yes": "y"}}
    assert not jsonschema.Draft202012Validator(json.loads(form.spec.text)).is_valid(bad)
    with pytest.raises(ValueError, match=r"key|Input should be|valid"):
        form.read(json.dumps(bad))


class Grade(enum.IntEnum):
    GOOD = 1
    BAD = 2


class Star(pydantic.BaseModel):
    name: str = "Sol"


@pytest.mark.parametrize(
    ("key", "said", "read", "other"),
    [
        (Grade, "2", Grade.BAD, "x"),
        (Colour, "red", Colour.RED, "x"),
        (decimal.Decimal, "1.5", decimal.Decimal("1.5"), "x"),
        (Annotated[int, pydantic.AfterValidator(abs)], "-3", 3, "x"),
        (Literal["a", "b"], "b", "b", "x"),
    ],
)
def test_keys_beside_a_pydantic_model_are_those_that_it_reads(key, said, read, other):
    form = value_format_of("gen", dict[key, Star])
    is_valid = jsonschema.Draft202012Validator(json.loads(form.spec.text)).is_valid
    assert is_valid({said: {}}) and not is_valid({other: {}})
    assert form.read(json.dumps({said: {}})) == {read: Star()}


@pytest.mark.parametrize("key", [None, int | None, Literal["a", 1], Annotated[int, pydantic.Field(ge=1)], bytes, Star])
def test_keys_that_no_schema_tells_are_refused_beside_a_pydantic_model(key):
    with pytest.raises(plait.InputError, match="cannot be generated"):
        value_format_of("gen", dict[key, Star])


def test_integers_have_no_more_digits_than_every_reader_of_json_holds(backend):
    for type_ in (list[int], Town, Model, Counts):
        for each in nodes(json.loads(value_format_of("gen", type_).spec.text)):
            if isinstance(each, dict) and each.get("type") == "integer":
                assert -(2**53) < each["minimum"] <= each["maximum"] < 2**53


@dataclasses.dataclass
class ByField:
    stars: Annotated[int, pydantic.Field(ge=1, le=5)]


@dataclasses.dataclass
class ByMeta:
    stars: Annotated[int, msgspec.Meta(ge=1, le=5)]


@pydantic.dataclasses.dataclass
class Validated:
    stars: int = pydantic.Field(ge=1, le=5)

    @pydantic.field_validator("stars")
    @classmethod
    def is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("stars are odd")
        return value


@dataclasses.dataclass
class Mixed:
    one: ByField
    other: ByMeta


@pytest.mark.parametrize("type_", [ByField, ByMeta, Validated])
def test_bounds_hold_in_dataclasses_whoever_annotates_them(type_):
    form = value_format_of("gen", list[type_])
    is_valid = jsonschema.Draft202012Validator(json.loads(form.spec.text)).is_valid
    assert is_valid([{"stars": 5}]) and not is_valid([{"stars": 6}]) and not is_valid([{"stars": 0}])
    assert form.read('[{"stars":5}]') == [type_(5)]
    with pytest.raises(ValueError, match="stars"):
        form.read('[{"stars":6}]')


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


def test_bounds_are_found_behind_hints_that_were_made_for_the_look_alone():
    """Such a hint is gone after it, and the next one may lie where it lay."""
    for _ in range(20):
        assert has_pydantic_types(Both)


def test_a_validator_of_a_pydantic_dataclass_is_asked():
    with pytest.raises(ValueError, match="stars are odd"):
        value_format_of("gen", Validated).read('{"stars":2}')


@dataclasses.dataclass
class Unresolved:
    place: Nowhere  # noqa: F821


class Wrapped(pydantic.BaseModel):
    data: bytes


@pytest.mark.parametrize(
    ("type_", "why"),
    [
        ("int", "type takes a type, such as int or a dataclass, not the text 'int'"),
        (bytes, "values of type bytes cannot be generated: Bytes values"),
        (Wrapped, "bytes cannot be written as JSON"),
        (complex, "values of type complex cannot be generated"),
        (type, "values of type type cannot be generated"),
        (collections.abc.Callable, "cannot be generated"),
        (dict[bytes, int], "cannot be generated"),
        (dict[tuple[int, int], int], "keys of a dict must be text or numbers, not Tuple values"),
        (dict[Literal["a", None], int], "keys of a dict must be text or numbers, not None"),
        (dict[Annotated[int, msgspec.Meta(ge=5)], int], "number keys of a dict cannot have bounds"),
        (Mixed, "bounds of both msgspec.Meta and Pydantic"),
        (ByMeta | Town, "Pydantic's Field instead may work"),
        (Unresolved, "name 'Nowhere' is not defined"),
        (Pet("Tom", "cat"), "cannot be generated"),
    ],
    ids=str,
)
def test_a_type_without_a_form_is_refused_where_it_is_written(type_, why):
    with pytest.raises(plait.InputError, match=re.escape(why)):
        gen("x", type=type_)


class Mark(enum.Enum):
    NAME = "a b"
    NUMBER = 7
    FRACTION = 2.5
    NOTHING = None


class Pair(enum.Enum):
    ONE = (1, 2)


class Starred(pydantic.BaseModel):
    mark: Mark


@pytest.mark.parametrize(
    ("type_", "why"),
    [
        (dict[Mark, int], "the keys of a dict must be text, or numbers without bounds"),
        (dict[Level, Mark], "the keys of a dict must be text, or numbers without bounds"),
        (dict[str, Pair], "Pair has members that are not text"),
        (list[Literal[Colour.RED]], "a Literal inside another type cannot contain Colour.RED; use Colour"),
        (list[Literal[Mark.NUMBER, "z"]], "cannot contain Mark.NUMBER"),
    ],
    ids=str,
)
def test_what_would_be_generated_in_full_and_never_read_is_refused(type_, why):
    with pytest.raises(plait.InputError, match=re.escape(why)):
        value_format_of("gen", type_)


# Types, and their values beside the JSON they are written as: every layer holds types of the layer below.
WORDS = st.text('ab \u00e9"\\', max_size=4)
DEFAULT_CALL_SYNTAX = [
    (int, st.integers(-(2**53) + 1, 2**53 - 1).map(lambda n: (n, n))),
    (str, WORDS.map(lambda text: (text, text))),
    (bool, st.booleans().map(lambda each: (each, each))),
    (float, st.integers(-999, 999).map(lambda n: (n / 4, n / 4))),
    (datetime.date, st.dates(datetime.date(1000, 1, 1)).map(lambda day: (day, day.isoformat()))),
    (decimal.Decimal, st.integers(0, 999).map(lambda n: (decimal.Decimal(n) / 8, str(decimal.Decimal(n) / 8)))),
    (Colour, st.sampled_from(Colour).map(lambda each: (each, each.value))),
    (Level, st.sampled_from(Level).map(lambda each: (each, each.value))),
    (Mark, st.sampled_from(Mark).map(lambda each: (each, each.value))),
    (Starred, st.sampled_from(Mark).map(lambda each: (Starred(mark=each), {"mark": each.value}))),
    (Literal["x", 3, True, None], st.sampled_from(["x", 3, True, None]).map(lambda each: (each, each))),
]
KEYS = {str: WORDS, int: st.integers(-99, 99), Colour: st.sampled_from(Colour)}


def key_text(key):
    return str(key.value if isinstance(key, enum.Enum) else key)


@st.composite
def record(draw, parts):
    """A dataclass, a NamedTuple, a Pydantic model or a tuple of some of the types below."""
    fields = draw(st.lists(parts, min_size=1, max_size=3))
    names = [f"f{i}" for i in range(len(fields))]
    kind, types_ = draw(st.sampled_from(["dataclass", "named", "model", "tuple"])), [each for each, _ in fields]
    members, number = list(zip(names, types_, strict=True)), next(NUMBERS)
    match kind:
        case "dataclass":
            type_ = dataclasses.make_dataclass(f"D{number}", members)
        case "named":
            type_ = NamedTuple(f"N{number}", members)
        case "model":
            type_ = pydantic.create_model(f"M{number}", **{name: (each, ...) for name, each in members})
        case _:
            type_ = tuple[tuple(types_)]
    as_list = kind in ("named", "tuple")

    def both(drawn):
        values, texts = zip(*drawn, strict=True)
        made = values if kind == "tuple" else type_(**dict(zip(names, values, strict=True)))
        return made, list(texts) if as_list else dict(zip(names, texts, strict=True))

    return type_, st.tuples(*(values for _, values in fields)).map(both)


@st.composite
def holder(draw, parts):
    """A list, a dict or an Optional of a type below."""
    inner, values = draw(parts)
    kind = draw(st.sampled_from(["list", "dict", "optional"]))
    if kind == "list":
        return list[inner], st.lists(values, max_size=3).map(lambda each: ([v for v, _ in each], [t for _, t in each]))
    if kind == "optional":
        return inner | None, st.one_of(st.just((None, None)), values.filter(lambda each: each[1] is not None))
    key = draw(st.sampled_from(list(KEYS)))
    pairs = st.dictionaries(KEYS[key], values, max_size=3)
    return dict[key, inner], pairs.map(
        lambda each: ({k: v for k, (v, _) in each.items()}, {key_text(k): t for k, (_, t) in each.items()})
    )


NUMBERS = itertools.count()
NESTED = st.recursive(
    st.sampled_from(DEFAULT_CALL_SYNTAX), lambda parts: st.one_of(record(parts), holder(parts)), max_leaves=5
)


@settings(max_examples=150, deadline=None)
@given(NESTED, st.data())
def test_values_of_nested_types_are_in_the_schema_and_are_read_back(nested, data):
    type_, values = nested
    value, said = data.draw(values)
    form = value_format_of("gen", list[type_])
    text = json.dumps([said])
    jsonschema.Draft202012Validator(json.loads(form.spec.text)).validate([said])
    (read,) = form.read(text)
    assert read == value and type(read) is type(value)


# -- whole values ---------------------------------------------------------------------------------


def test_a_typed_value_is_complete_and_no_default_stop_cuts_it(backend):
    backend.script(default=PERSON)
    state = ask.run(Person, stop="\n", max_new_tokens=200)
    sampling = backend.scheduler.sent(Generate)[0].sampling
    assert sampling.complete and sampling.stop == () and sampling.max_tokens == 200
    assert state["value"].name == "Ada"


def test_a_choice_has_room_whatever_max_tokens_the_run_gives(backend):
    backend.script(default="deep blue")
    assert ask.run(Colour, max_new_tokens=2)["value"] is Colour.BLUE


def test_a_cut_value_raises_an_error_that_names_max_tokens(backend):
    backend.script(default="123456")
    state = ask.run(int, max_tokens=3, complete=False)
    assert state.text_of("value") == "123"
    with pytest.raises(plait.UnreadableValue, match=r"program 'ask', variable 'value': max_tokens cut the int off"):
        state["value"]
    with pytest.raises(ValueError, match="max_tokens"):
        state["value"]


def test_what_only_a_validator_knows_is_said_when_the_value_is_read(backend):
    backend.script(default='{"title":"LOUD","stars":3,"when":"2024-05-01T12:30:00Z"}')
    with pytest.raises(plait.UnreadableValue, match="a title does not shout") as caught:
        ask.run(Model)["value"]
    assert caught.value.text.startswith('{"title"')

    @plait.function
    def reads(s):
        s += "Q: " + gen("value", type=Model)
        return s["value"]

    with pytest.raises(plait.UnreadableValue) as caught:
        reads.run()
    assert caught.value.text.startswith('{"title"'), "raised anew, it keeps what it knows"


def test_n_values_and_joined_ones(backend):
    backend.script(default="7")
    assert ask.run(int, n=3)["value"] == [7, 7, 7]

    @plait.function
    def forks(s):
        s += "Q"
        branches = s.fork(2)
        branches += gen("number", type=int)
        branches.join()

    assert forks.run()["number"] == [7, 7]


# -- the handle -----------------------------------------------------------------------------------

AGE = gen("age", type=int)


@plait.function
def by_handle(s):
    s += "I am " + AGE + " years old."
    return s[AGE] + 1


def test_a_handle_reads_its_own_value(backend):
    backend.script(default="41")
    state = by_handle.run()
    assert state.ret_value == 42 and state[AGE] == 41 and state.text_of(AGE) == "41"


def test_a_handle_refuses_another_value_under_its_name(backend):
    backend.script(default="41")
    state = by_handle.run()
    with pytest.raises(plait.InputError, match="is not the value of this gen"):
        state[gen("age", type=float)]
    with pytest.raises(plait.MissingVariable, match="no variable 'ag'"):
        state[gen("ag", type=int)]
    with pytest.raises(plait.InputError, match="without a name"):
        state[gen(type=int)]
    state["age"] = 3
    with pytest.raises(plait.InputError, match=r"read s\['age'\]"):
        state[AGE]


def test_mypy_knows_the_types(tmp_path):
    (tmp_path / "typed_program.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nfrom typing import Literal\nimport plait\n\n"
        "@dataclass\nclass Person:\n    name: str\n\n"
        "@plait.function\ndef program(s: plait.ProgramState) -> None:\n"
        "    p = plait.gen('p', type=Person, temperature=0.5)\n    s += 'x'\n    s += p\n    reveal_type(s[p])\n"
        "    reveal_type(s[plait.gen('l', 16, type=list[int])])\n"
        "    reveal_type(s[plait.gen('c', type=Literal['a'])])\n    reveal_type(s['p'])\n"
        "    reveal_type(plait.gen('t', max_tokens=3))\n    s[p].nome\n    plait.gen('t', max_tokens='3')\n"
    )
    command = [sys.executable, "-P", "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache"), str(tmp_path / "typed_program.py")],
        env={"MYPYPATH": str(ROOT / ".types"), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = re.findall(r"typed_program.*(?:Revealed type is|error:) (.*)", done.stdout)
    assert said[0] == '"typed_program.Person"', done.stdout + done.stderr
    assert said[1] in ('"builtins.list[builtins.int]"', '"list[int]"')
    assert said[2:4] == ['"Any"', '"Any"']
    assert "Expr" in said[4]
    assert '"Person" has no attribute "nome"' in said[5] and "gen" in said[6] and len(said) == 7


# -- mistakes -------------------------------------------------------------------------------------


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
def test_mistakes_are_said_where_they_are_written(make, message):
    with pytest.raises(plait.InputError, match=message):
        make()


# -- the patterns ---------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([int, float, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID]),
       st.data())  # fmt: skip
def test_whatever_matches_a_plain_types_pattern_can_be_read(type_, data):
    form = value_format_of("gen", type_)
    text = data.draw(st.from_regex(re.compile(form.spec.pattern, re.ASCII), fullmatch=True))
    assert type(form.read(text)) is type_


@settings(max_examples=200, deadline=None)
@given(st.dates(min_value=datetime.date(1000, 1, 1)))
def test_every_date_from_the_year_1000_can_be_written(day):
    assert re.fullmatch(patterns.DATE, day.isoformat())
