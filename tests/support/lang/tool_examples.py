"""Functions that tests give to a model as tools, a program that calls one, and a scripted call."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
from typing import Annotated, Literal

import jsonschema
import pydantic

import plait
from plait import assistant, gen, user
from plait.lang.tools.call_format import tool_call_format
from plait.runtime.chat.json_calls import tool_calls


@dataclasses.dataclass
class Range:
    low: int
    high: int


def add(a: int, b: int = 5) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second,
            if any
    """
    return a + b


def search(text: str, kind: Literal["web", "news"] = "web", since: datetime.date | None = None) -> list[str]:
    """Searches.

    :param text: what to look for
    """
    return [text, kind, str(since)]


async def async_tool(within: Range) -> dict[str, int]:
    """Waits."""
    await asyncio.sleep(0)
    return dataclasses.asdict(within)


def failing() -> None:
    raise ZeroDivisionError("by zero")


class Email(pydantic.BaseModel):
    to: Annotated[str, pydantic.AfterValidator(lambda value: value if "@" in value else int("no address"))]


def send(email: Email) -> Email:
    return email


TOOLS = [add, search, async_tool, failing, send]


@plait.function
def agent(s, **keywords):
    s += user("Do it.")
    s += assistant(gen("call", tools=TOOLS, **keywords))
    return s.call("call")


def call_text(name, **arguments):
    """The text of a call in the default form."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script_call(backend, name, **arguments):
    backend.script(default=call_text(name, **arguments))


def call_validator(tools):
    """Whether a call (name, arguments) is valid for the schema of calls that services without other constraints get."""
    schema = tool_calls(tool_call_format(tuple(tools), "required").spec).as_json().schema
    validator = jsonschema.Draft202012Validator(schema)
    return lambda name, arguments: validator.is_valid({"name": name, "arguments": arguments})
