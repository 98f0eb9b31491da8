"""Typed values: the constraint that is sent for a type, and the value that is read back."""

from __future__ import annotations

import datetime
import decimal
import json
import re
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import pytest
from typed_examples import (
    PERSON,
    Colour,
    Counts,
    Level,
    Model,
    Person,
    Pet,
    Place,
    Point,
    Town,
    Tree,
    ask,
)

import plait
from plait import gen
from plait.constrained import Choices, JsonSchema, Regex
from plait.runtime.messages import Generate

UTC = datetime.UTC
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


@pytest.mark.parametrize(("type_", "text", "value"), CASES, ids=lambda value: str(value)[:30])
def test_generated_text_is_read_as_the_type(backend, type_, text, value):
    backend.script(default=text)
    state = ask.run(type_)
    assert state["value"] == value and type(state["value"]) is type(value)
    assert state["value"] is state["value"], "the text is parsed once"
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


def test_typed_gen_is_complete_and_ignores_the_stop_of_run(backend):
    backend.script(default=PERSON)
    state = ask.run(Person, stop="\n", max_new_tokens=200)
    sampling = backend.scheduler.sent(Generate)[0].sampling
    assert sampling.complete and sampling.stop == () and sampling.max_tokens == 200
    assert state["value"].name == "Ada"


def test_enum_value_may_be_longer_than_max_tokens_of_run(backend):
    backend.script(default="deep blue")
    assert ask.run(Colour, max_new_tokens=2)["value"] is Colour.BLUE


def test_cut_value_is_an_unreadable_value_that_names_max_tokens(backend):
    backend.script(default="123456")
    state = ask.run(int, max_tokens=3, complete=False)
    assert state.text_of("value") == "123"
    with pytest.raises(plait.UnreadableValue, match=r"program 'ask', variable 'value': max_tokens cut the int off"):
        state["value"]
    with pytest.raises(ValueError, match="max_tokens"):
        state["value"]


def test_validator_error_is_raised_when_the_value_is_read(backend):
    backend.script(default='{"title":"LOUD","stars":3,"when":"2024-05-01T12:30:00Z"}')
    with pytest.raises(plait.UnreadableValue, match="a title is not in capitals") as caught:
        ask.run(Model)["value"]
    assert caught.value.text.startswith('{"title"')

    @plait.function
    def reads(s):
        s += "Q: " + gen("value", type=Model)
        return s["value"]

    with pytest.raises(plait.UnreadableValue) as caught:
        reads.run()
    assert caught.value.text.startswith('{"title"'), "the error raised by run keeps the text"


def test_samples_and_joined_branches_are_lists_of_typed_values(backend):
    backend.script(default="7")
    assert ask.run(int, n=3)["value"] == [7, 7, 7]

    @plait.function
    def forks(s):
        s += "Q"
        branches = s.fork(2)
        branches += gen("number", type=int)
        branches.join()

    assert forks.run()["number"] == [7, 7]
