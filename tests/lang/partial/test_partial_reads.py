"""`state.partial(...)`, `partial_iter` and `partial_async_iter`: values while they are generated."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field

import pytest
from sample_programs import collect
from scripted_scheduler import Gate

import plait
from plait import gen, select

pytestmark = pytest.mark.timeout(120)


@dataclass
class Person:
    name: str
    age: int
    towns: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.age > 150:
            raise ValueError("nobody is that old")


TEXT = json.dumps({"name": "Ada Lovelace", "age": 36, "towns": ["London", "Bath"]})
PERSON = gen("person", type=Person)


@plait.function
def describe(s):
    s += "Who? " + PERSON + gen("note")


def held_back(backend, early, answer=TEXT):
    """Gives the first characters of the answer, and the rest when the gate that is returned is opened."""
    gate = Gate(answer, early=answer[:early])
    backend.script(("Who? ", gate))
    return gate


def test_partial_value_is_what_is_there_so_far(backend):
    gate = held_back(backend, TEXT.index("lace"))
    state = describe.run(stream=True)
    assert gate.reached.wait(60)
    person = state.partial("person")
    assert type(person) is Person and person.name.startswith("Ada") and person.age is None and person.towns is None
    assert state.partial(PERSON) == person
    gate.open()
    assert state["person"] == Person("Ada Lovelace", 36, ["London", "Bath"]) == state.partial("person")


def test_iteration_yields_growing_values_and_ends_with_the_value(backend):
    gate = held_back(backend, 20)
    state = describe.run(stream=True)
    values = state.partial_iter(PERSON)
    first = next(values)
    assert type(first) is Person and "Ada Lovelace".startswith(first.name or "")
    gate.open()
    seen = [first, *values]
    names = [person.name or "" for person in seen]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(names))
    assert seen[-1] == state["person"] and seen.count(seen[-1]) == 1


def test_async_iteration(backend):
    gate = held_back(backend, 20)

    @plait.function
    async def program(s):
        s += "Who? " + PERSON
        inside = [person.name async for person in s.stream_partial(PERSON)]
        return inside, await s.partial("person")

    async def read():
        state = await program.arun(stream=True)
        seen = []
        async for person in state.stream_partial("person"):
            seen.append(person)
            gate.open()
        await state.sync()
        return seen, state.ret_value, await collect(describe.run(stream=True).partial_async_iter("person"))

    seen, (inside, last), again = asyncio.run(read())
    assert seen[-1] == last == again[-1] == Person("Ada Lovelace", 36, ["London", "Bath"])
    assert inside[-1] == "Ada Lovelace" and len(seen) > 1


def test_value_that_a_validator_refuses_is_partial_until_it_is_complete(backend):
    held_back(backend, 0, TEXT.replace("36", "360")).open()
    state = describe.run(stream=True)
    with pytest.raises(plait.UnreadableValue, match="nobody is that old"):
        list(state.partial_iter("person"))
    with pytest.raises(plait.UnreadableValue):
        state.partial("person")


def test_retries_begin_again(backend):
    refused, accepted = TEXT.replace("36", "360"), TEXT
    gates = [Gate(refused, early=refused[:30]), Gate(accepted, early=accepted[:20])]
    remaining = list(gates)
    backend.scheduler.answer = lambda prompt, request: remaining.pop(0)

    @plait.function
    def program(s):
        s += "Who? " + gen("person", type=Person, retries=1)

    state = program.run(stream=True)
    assert gates[0].reached.wait(60)
    assert state.partial("person").name == "Ada Lovelace"
    gates[0].open()
    assert gates[1].reached.wait(60)
    values = state.partial_iter("person")
    next(person for person in values if person.age is None)  # of the second attempt, after the refused person
    gates[1].open()
    assert list(values)[-1].age == 36


def test_other_variables(backend):
    gate = Gate("early late", early="early")
    backend.script(("a:", gate), ("b:", Gate("12", early="1")), default="x")

    @plait.function
    def program(s):
        s += "a:" + gen("text") + select("choice", ["x", "y"]) + "b:" + gen("number", type=int)
        s["set"] = 3

    state = program.run(stream=True)
    assert gate.reached.wait(60)
    assert state.partial("text") == "early" and state.partial("choice") is None and state.partial("number") is None
    with pytest.raises(plait.InputError, match="no partial value"):
        state.partial("set")
    with pytest.raises(plait.MissingVariable):
        state.partial("nosuch")
    state.abort()
    with pytest.raises(plait.ProgramError):
        state.partial("text")


def test_samples_and_joined_values_are_lists(backend):
    backend.scheduler.answer = lambda prompt, request: TEXT

    @plait.function
    def program(s):
        s += "Who? " + gen("person", type=Person, n=2)
        forks = s.fork(2)
        forks += gen("other", type=Person)
        forks.join()

    state = program.run()
    assert [person.age for person in state.partial("person")] == [36, 36]
    assert [person.age for person in list(state.partial_iter("other"))[-1]] == [36, 36]


@pytest.mark.timeout(20)  # a read that waits here waits for ever
def test_a_named_group_behind_reasoning_has_no_partial_value(backend):
    @plait.function
    def program(s):
        s += "Who? " + gen("year", regex="(?P<century>18|19)[0-9]{2}", think=True)

    gate = held_back(backend, 9, "<think>so</think>\n\n1815")
    state = program.run(stream=True)
    assert gate.reached.wait(10)
    assert state.partial("century") is None
    gate.open()
    assert (state["century"], state["year"]) == ("18", "1815")


def test_compiled_program_reads_the_complete_value(backend):
    backend.scheduler.answer = lambda prompt, request: TEXT

    @plait.function
    def program(s):
        s += "Who? " + PERSON
        for person in s.partial_iter("person"):
            s += person.name

    assert program.compile().run().text() == f"Who? {TEXT}Ada Lovelace"
