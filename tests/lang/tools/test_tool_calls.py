"""Tool calls: typed arguments, results and exceptions as messages, tool_choice."""

from __future__ import annotations

import asyncio
import datetime

import pytest
from tool_examples import add, agent, script_call

import plait
from plait import gen
from plait.constrained import Structural
from plait.lang.tools.call_format import CALL_END_MARKER
from plait.runtime.messages import Generate


def test_call_has_typed_arguments_and_its_result_is_a_message(backend):
    script_call(backend, "search", text="cats", since="2024-01-02")
    state = agent.run()
    call, result = state["call"], state.ret_value
    assert call.name == "search" and call.arguments["since"] == datetime.date(2024, 1, 2)
    assert call.arguments["kind"] == "web", "a default of the function"
    assert result.value == ["cats", "web", "2024-01-02"] and result.error is None
    assert state.messages() == [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": '<tool_call>\n{"name": "search", "arguments": {"text": "cats", '
                                         '"since": "2024-01-02"}}\n</tool_call>'},
        {"role": "user", "content": 'Result of search: ["cats","web","2024-01-02"]'},
    ]  # fmt: skip
    request = backend.scheduler.sent(Generate)[0]
    assert isinstance(request.constraint, Structural) and request.sampling.complete


def test_exception_of_a_tool_is_a_message(backend):
    script_call(backend, "failing")
    state = agent.run()
    assert isinstance(state.ret_value.error, ZeroDivisionError)
    assert state.messages()[-1]["content"] == "Result of failing: Error: ZeroDivisionError: by zero"


def test_validator_error_of_the_arguments_is_a_message(backend):
    script_call(backend, "send", email={"to": "nobody"})
    state = agent.run()
    assert state.ret_value.call is None and isinstance(state.ret_value.error, ValueError)
    assert "Result of send: Error:" in state.messages()[-1]["content"]
    script_call(backend, "send", email={"to": "a@b"})
    assert agent.run().messages()[-1]["content"] == 'Result of send: {"to":"a@b"}'


def test_async_tool_is_awaited(backend):
    script_call(backend, "async_tool", within={"low": 1, "high": 2})
    assert agent.run().ret_value.value == {"low": 1, "high": 2}

    async def inside_a_loop():
        return agent.run().ret_value

    result = asyncio.run(inside_a_loop())
    assert "async def" in str(result.error)


def test_keyboard_interrupt_in_a_tool_ends_the_program(backend):
    def interrupted() -> None:
        raise KeyboardInterrupt

    @plait.function
    def program(s):
        s += "x" + gen("call", tools=[interrupted])
        s.call("call")

    script_call(backend, "interrupted")
    with pytest.raises(KeyboardInterrupt):
        program.run()


def test_tool_choice_by_name_or_function_allows_one_tool(backend):
    script_call(backend, "add", a=1)
    for choice in ("add", add):
        assert agent.run(tool_choice=choice).ret_value.value == 6
        assert [call.name for call in backend.scheduler.sent(Generate)[-1].constraint.calls] == ["add"]


def test_tool_choice_auto_answers_or_calls(backend):
    backend.script(default="It is five.")
    state = agent.run(tool_choice="auto", max_tokens=5)
    assert state["call"] is None and state.ret_value is None and state.text_of("call") == "It is"
    request = backend.scheduler.sent(Generate)[-1]
    assert isinstance(request.constraint, Structural) and request.sampling.stop == (CALL_END_MARKER,)
    backend.script(default='I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    state = agent.run(tool_choice="auto", max_tokens=200)
    assert state["call"].name == "add" and state.ret_value.value == 6
    assert state.messages()[-1]["content"] == "Result of add: 6"


def test_tool_choice_none_is_free_text(backend):
    state = agent.run(tool_choice="none")
    assert state["call"] is None and state.ret_value is None and state.text_of("call") == " fine."


def test_result_without_turns_is_a_line_of_text(backend):
    @plait.function
    def inline(s):
        s += "Act: " + gen("call", tools=[add])
        s.call("call")
        s += "Done"

    script_call(backend, "add", a=2, b=2)
    assert inline.run().text() == (
        'Act: <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>\nResult of add: 4\nDone'
    )
