"""Tool descriptions and schemas, made from signatures, annotations and docstrings."""

from __future__ import annotations

import datetime
from typing import Annotated

import pydantic
import pytest
from tool_examples import TOOLS, add, call_validator

from plait.lang.tools.make_tools import make_tool, make_tools, read_docstring


def test_signature_and_docstring_become_name_description_and_schema():
    assert make_tool("gen", add).as_json() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second, if any"},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_description_has_only_formats_and_bounds_of_the_annotations():
    def book(
        day: datetime.date,
        price: float,
        nights: Annotated[int, pydantic.Field(ge=1)],
        title: str = "Mr",
    ) -> None:
        """Books a room."""

    tool = make_tool("gen", book)
    assert tool.as_json()["function"]["parameters"]["properties"] == {
        "day": {"type": "string", "format": "date"},
        "price": {"type": "number"},
        "nights": {"type": "integer", "minimum": 1},
        "title": {"type": "string"},
    }
    constrained = tool.parameters["properties"]
    assert (
        "pattern" in constrained["day"]
        and constrained["price"]["maximum"] == 1e15
        and constrained["nights"]["maximum"] == 2**53 - 1
    )


@pytest.mark.parametrize(
    "text",
    [
        "Does it.\n\nArgs:\n    a: one\n    b (int): two\n        more\n\nReturns:\n    c: not this",
        "Does it.\n\n:param a: one\n:param int b: two\n    more\n:returns: c: not this",
        "Does it.\n\nParameters\n----------\na : int\n    one\nb : int\n    two\n    more\n\nReturns\n-------\nc : int",
    ],
)
def test_google_sphinx_and_numpy_docstrings_are_read(text):
    assert read_docstring(text) == ("Does it.", {"a": "one", "b": "two more"})


def test_call_schema_accepts_only_the_arguments_of_the_named_tool():
    is_valid = call_validator(make_tools("gen", TOOLS))
    assert is_valid("async_tool", {"within": {"low": 1, "high": 2}})
    assert is_valid("failing", {})
    for wrong in (
        ("async_tool", {"a": 1}),
        ("add", {"a": "1"}),
        ("add", {"a": 1, "c": 1}),
        ("none", {}),
        ("send", {"email": {"to": 1}}),
    ):
        assert not is_valid(*wrong)
