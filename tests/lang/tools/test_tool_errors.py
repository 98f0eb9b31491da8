"""Wrong tools and arguments of gen with tools, and calls that were cut."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from tool_examples import add, agent, script_call

import plait
from plait import gen, system


def untyped(a) -> None: ...


def var_positional(*a: int) -> None: ...


def unresolved_type(a: threading.Lock) -> None: ...  # noqa: F821


def type_without_schema(a: asyncio.Lock) -> None: ...


LONG_SCHEMA = list[Literal["x" * (1 << 20)]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gen("x", tools=[untyped]), r"gen\('x'\): parameter 'a' of the tool 'untyped' needs a type"),
        (lambda: gen("x", tools=[var_positional]), "'a' of the tool 'var_positional' cannot be passed by keyword"),
        (lambda: gen("x", tools=[unresolved_type]), "types of the tool 'unresolved_type' cannot be read"),
        (lambda: gen("x", tools=[type_without_schema]), "'type_without_schema' cannot be described"),
        (lambda: gen("x", tools=[lambda: 1]), "a tool must be a function whose name"),
        (lambda: gen("x", tools=[add, add]), "two tools are named 'add'"),
        (lambda: gen("x", tools=[]), "1 to 128 tools"),
        (lambda: gen("x", tools="add"), "a list of functions or Tool objects"),
        (lambda: gen("x", tools=[add], tool_choice="sub"), r"one of the tools \(add\), not 'sub'"),
        (lambda: gen("x", tool_choice="auto"), "tool_choice needs tools"),
        (lambda: gen("x", tools=[add], regex="a"), "beside tools, give type or json_schema"),
        (lambda: gen("x", tools=[add], type=int, json_schema="{}"), "beside tools, give type or json_schema"),
        (lambda: gen("x", tools=[add], type=asyncio.Lock), "values of type Lock cannot be generated"),
        (lambda: gen("x", tools=[add], type=LONG_SCHEMA), "cannot be generated: the schema is longer than"),
        (lambda: gen("x", tools=[add], type=int, tool_choice="required"), 'tool_choice must be "auto"'),
        (lambda: gen("x", tools=[add], type=int, tool_choice="none"), 'tool_choice must be "auto"'),
        (lambda: gen("x", tools=[add], type=int, stop="a"), "stop has no effect with tools"),
        (lambda: gen("x", tools=[add], n=2), "tools cannot be combined with n; use forks"),
        (lambda: gen("x", tools=[add], stop="a"), "stop has no effect with tools"),
        (lambda: gen("x", tools=[add], tool_choice="auto", complete=True), "complete needs"),
        (lambda: system("x", tools=[untyped]), "system: parameter 'a'"),
    ],
)
def test_wrong_tool_or_argument_is_an_input_error(make, message):
    with pytest.raises(plait.InputError, match=message):
        make()


def test_s_call_of_a_text_variable_is_an_error(backend):
    @plait.function
    def program(s):
        s += "x" + gen("text")
        s.call("text")

    with pytest.raises(plait.ProgramError, match="variable 'text' is not a tool call"):
        program.run()


def test_call_cut_off_by_max_tokens_is_an_unreadable_value(backend):
    script_call(backend, "add", a=1)
    with pytest.raises(plait.UnreadableValue, match="max_tokens cut the call of a tool off"):
        agent.run(max_tokens=12, complete=False)
