"""Programs that are methods of a class."""

from __future__ import annotations

import asyncio

import plait
from plait import gen


class Clerk:
    def __init__(self, name):
        self.name = name

    @plait.function
    def greet(self, s, guest):
        s += f"{self.name} greets {guest}:" + gen("greeting")
        return self

    @plait.function
    async def greet_on_a_loop(self, s, guest):
        s += f"{self.name} greets {guest}:" + gen("greeting")
        return await s["greeting"]

    @staticmethod
    @plait.function
    def alone(s, guest):
        s += f"{guest}:" + gen("greeting")


def test_a_method_gets_its_object_and_the_state(backend):
    backend.script(default="hello")
    ada, ben = Clerk("Ada"), Clerk("Ben")
    state = ada.greet.run("Cy")
    assert state.text() == "Ada greets Cy:hello" and state.ret_value is ada
    states = ben.greet.run_batch([{"guest": "Di"}, {"guest": "Ed"}], max_tokens=8)
    assert [state.text() for state in states] == ["Ben greets Di:hello", "Ben greets Ed:hello"]
    assert ben.greet.bind(guest="Fay").run().text() == "Ben greets Fay:hello"
    assert asyncio.run(ada.greet_on_a_loop.arun("Gus")).ret_value == "hello"
    assert ada.greet.name == "greet"


def test_a_method_continues_the_state_of_another_program(backend):
    backend.script(default="hello")

    @plait.function
    def outer(s):
        s += "Note. "
        Clerk("Ada").greet(s, guest="Cy")

    assert outer.run().text() == "Note. Ada greets Cy:hello"


def test_a_static_method_and_the_class_itself_bind_nothing(backend):
    backend.script(default="hello")
    assert Clerk("Ada").alone.run("Cy").text() == Clerk.alone.run("Cy").text() == "Cy:hello"
    assert Clerk.greet.name == "greet"
