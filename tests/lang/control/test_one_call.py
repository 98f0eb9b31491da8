"""`extract`, `classify` and `ask`: what the model reads, what they return, and what they refuse."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Literal, TypedDict

import pydantic
import pytest

import plait
from plait.runtime.messages import Generate


@dataclasses.dataclass
class Person:
    name: str
    born: int


class Trip(pydantic.BaseModel):
    town: str = pydantic.Field(description="where it goes to")


class Town(TypedDict):
    name: str


class Mood(enum.Enum):
    GOOD = "positive"
    BAD = "negative"


class Even(pydantic.BaseModel):
    number: Annotated[int, pydantic.AfterValidator(lambda value: value if value % 2 == 0 else int("odd"))]


@pytest.fixture
def prompts(backend):
    """Sets the answers of the model, in order (the last one is repeated). Returns the prompts that it got."""
    seen = []

    def answer(*texts):
        left = list(texts)

        def next_answer(prompt, request):
            seen.append(prompt)
            return left.pop(0) if len(left) > 1 else left[0]

        backend.scheduler.answer = next_answer
        return seen

    return answer


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (Person, '{"name": "Ada", "born": 1815}', Person("Ada", 1815)),
        (Trip, '{"town": "Rome"}', Trip(town="Rome")),
        (Town, '{"name": "Rome"}', {"name": "Rome"}),
        (list[int], "[1, 2]", [1, 2]),
        (int, "1815", 1815),
        (Literal["a", "b"], "b", "b"),
        (str, "text", "text"),
    ],
)
def test_extract_returns_an_instance_of_the_type(prompts, type_, text, value):
    prompts(text)
    found = plait.extract(type_, "Ada was born in 1815.")
    assert found == value and type(found) is type(value)


def test_the_model_reads_the_text_the_task_and_descriptions(prompts):
    seen = prompts('{"name": "Ada", "born": 1815}')
    plait.extract(Person, "Ada.")
    plait.extract(Person, "Ada.", instructions="Who?")
    prompts('{"town": "Rome"}')
    plait.extract(Trip, "To Rome.")
    prompts("5")
    plait.extract(int, "Five.")
    bodies = [prompt.split("user\n")[-1].split("<")[0] for prompt in seen]
    assert bodies[0] == "Ada.\n\nExtract the facts from the text above as JSON." and bodies[1] == "Ada.\n\nWho?"
    assert bodies[2].startswith("To Rome.\n\nExtract the facts from the text above as JSON.\nThe JSON schema: {")
    assert '"where it goes to"' in bodies[2] and bodies[3] == "Five.\n\nExtract the facts from the text above."


def test_extract_asks_again_and_then_raises(prompts):
    prompts('{"number": 3}', '{"number": 4}')
    assert plait.extract(Even, "3 or 4", retries=1) == Even(number=4)
    prompts('{"number": 3}')
    with pytest.raises(plait.UnreadableValue, match="odd"):
        plait.extract(Even, "3 or 4")


def test_a_list_gives_a_list(prompts, backend):
    backend.scheduler.answer = lambda prompt, request: "1" if "one" in prompt else "2"
    assert plait.extract(int, ["one", "two", "one"]) == [1, 2, 1]
    assert plait.ask(["one", "two"]) == ["1", "2"] and plait.ask([]) == []
    backend.scheduler.pick = lambda prompt, choices: 0 if "one" in prompt else 1
    assert plait.classify(("one", "two"), ["a", "b"]) == ["a", "b"]


def test_a_list_raises_the_error_of_its_text(backend):
    backend.scheduler.answer = lambda prompt, request: "x" if "two" in prompt else "1"
    with pytest.raises(plait.UnreadableValue):
        plait.extract(int, ["one", "two"])


def test_classify_returns_a_label_of_each_kind(backend):
    seen = []

    def pick(prompt, choices):
        seen.append(prompt)
        return len(choices) - 1

    backend.scheduler.pick = pick
    assert plait.classify("x", ["a", "b"]) == "b"
    assert plait.classify("x", Mood) is Mood.BAD
    assert plait.classify("x", Literal["a", "b"]) == "b"
    assert plait.classify("x", bool) in (True, False)
    assert plait.classify("x", {"a": "the first", "b": "the second"}, instructions="Which one?") == "b"
    assert "Which label fits the text?\n- a\n- b\n\nText: x" in seen[0] and seen[0].endswith("Label: ")
    assert "Which one?\n- a: the first\n- b: the second\n\nText: x" in seen[-1]


def test_sampling_is_greedy_unless_it_is_given(prompts, backend):
    prompts("fine")

    def sampled(**keywords):
        plait.ask("x", **keywords)
        return backend.scheduler.sent(Generate)[-1].sampling

    assert (sampled().temperature, sampled().max_tokens) == (0, 512)
    assert (sampled(temperature=0.5).temperature, sampled(max_new_tokens=3).max_tokens) == (0.5, 3)
    given = sampled(sampling={"temperature": 0.7, "max_tokens": 9}, seed=3)
    assert (given.temperature, given.max_tokens, given.seed) == (0.7, 9, 3)


def test_ask_takes_instructions_a_budget_and_a_backend(prompts, backend):
    seen = prompts("fine")
    assert plait.ask("Why?", instructions="Be short.", backend=backend) == "fine"
    assert (
        "system\nBe short." in seen[0] and "user\nWhy?" in seen[0] and "system" not in (plait.ask("Why?"), seen[1])[1]
    )
    prompts("a long answer")
    with pytest.raises(plait.ProgramError, match=r"program 'ask'"):
        plait.ask(["Why?"] * 2, adapter="missing", budget=plait.Budget(tokens=1), timeout=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plait.ask(3), "ask: it takes a text or a list of texts, not 3"),
        (lambda: plait.ask(["a", 3]), "ask: it takes a text or a list of texts"),
        (lambda: plait.ask("x", temprature=1), "did you mean 'temperature'"),
        (lambda: plait.ask("x", stream=True), "ask: it returns the whole value"),
        (lambda: plait.ask("x", instructions=3), "instructions must be text, not 3"),
        (lambda: plait.ask("x", temperature=1, sampling={"temperature": 1}), "temperature is given twice"),
        (lambda: plait.ask("x", sampling=3), "sampling must be a dict of sampling keywords, not 3"),
        (lambda: plait.classify("x", {"a": "the first", "b": None}), "has a text that describes each, not"),
        (lambda: plait.extract(None, "x"), "type takes a type, such as int or a dataclass, not None"),
        (lambda: plait.classify("x", "abc"), "choices must be a list of texts"),
        (lambda: plait.classify("x", []), "1 to 1024 choices"),
        (lambda: plait.classify("x", int), "choices may be an Enum, a Literal or bool"),
        (lambda: plait.extract(bytes, "x"), "values of type bytes cannot be generated"),
        (lambda: plait.extract("int", "x"), "type takes a type"),
    ],
)
def test_wrong_arguments_are_input_errors(backend, call, message):
    with pytest.raises(plait.InputError, match=message):
        call()
