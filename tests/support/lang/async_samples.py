"""An async program and a plain one for the tests of event loops."""

from __future__ import annotations

import asyncio

import plait
from plait import assistant, gen, select, user


@plait.function
async def chat(s, question):
    s += user(question)
    s += assistant(gen("answer"))
    first = await s["answer"]
    s += user("More?") + assistant(select("kind", ["yes", "no"]))
    return first, await s["kind"]


@plait.function
def plain_program(s, question):
    s += question + gen("answer")


def run(coroutine):
    """The result of a coroutine on a new event loop."""
    return asyncio.run(coroutine)
