"""Short programs that several tests run, and a reader of asynchronous streams."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

import plait
from plait import assistant, gen, select, system, user


@plait.function
def qa(s, question):
    s += question + gen("answer")


@plait.function
def talk(s, question):
    s += system("Be good.") + user(question)
    s += assistant(gen("answer", stop="."))
    s += user("Sure?") + assistant(select("sure", ["yes", "no"]))


def run_expression(expression: Any, **options: Any) -> Any:
    """The state of a program that appends `expression` to the text "p"; `options` are those of `run`."""

    @plait.function
    def program(s):
        s += "p"
        s += expression

    return program.run(**options)


async def collect(pieces: AsyncIterable[Any]) -> list[Any]:
    return [piece async for piece in pieces]
