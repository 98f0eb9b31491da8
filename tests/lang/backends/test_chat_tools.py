"""Optional tools over a chat API: what is sent, and how a streamed call becomes the text that the gen reads."""

from __future__ import annotations

import json

import fake_servers as servers
import pytest

import plait
from plait import assistant, gen, user
from plait.constrained import Regex, Structural
from plait.runtime.chat.json_calls import tool_calls


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: The first.
    """
    return a + b


def look_up(word: str) -> str:
    """Looks a word up."""
    return word


def call_deltas(name, pieces, index=0):
    first = {"index": index, "id": "c1", "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
    return [{"choices": [{"delta": {"tool_calls": [call]}}]} for call in (first, *rest)]


def chat_server(*events, reason="tool_calls"):
    end = {"choices": [{"delta": {}, "finish_reason": reason}]}
    return servers.FakeServer(lambda path, body: [*events, end, b"[DONE]"])


@plait.function
def program(s):
    s += user("2 + 3?") + assistant(gen("step", tools=[add, look_up], tool_choice="auto", max_tokens=50))


def test_tools_are_those_of_the_api() -> None:
    server = chat_server(
        {"choices": [{"delta": {"content": "Let me "}}]},
        {"choices": [{"delta": {"content": "add."}}]},
        *call_deltas("add", ['{"a": 2,', ' "b": 3}']),
        *call_deltas("look_up", ['{"word": "x"}'], index=1),
    )
    state = program.run(backend=plait.OpenAI("m", server.url))
    call = state["step"]
    assert (call.name, call.arguments) == ("add", {"a": 2, "b": 3})
    text = 'Let me add.<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    assert state.text_of("step") == text and state.get_meta_info("step")["finish_reason"]["type"] == "stop"
    (body,) = server.bodies("/chat/completions")
    assert body["tool_choice"] == "auto" and body["parallel_tool_calls"] is False
    assert "stop" not in body and "response_format" not in body
    functions = [tool["function"] for tool in body["tools"]]
    assert [function["name"] for function in functions] == ["add", "look_up"]
    assert functions[0]["parameters"]["properties"]["a"]["type"] == "integer"
    assert functions[0]["parameters"]["required"] == ["a"]
    server.close()


def test_text_without_a_call() -> None:
    server = chat_server({"choices": [{"delta": {"content": "Five."}}]}, reason="stop")
    state = program.run(backend=plait.OpenAI("m", server.url))
    assert state["step"] is None and state.text_of("step") == "Five."
    server.close()


def test_a_call_that_max_tokens_cut_off_is_an_error() -> None:
    server = chat_server(*call_deltas("add", ['{"a": 2,']), reason="length")
    with pytest.raises(plait.ProgramError, match="arguments of a call of 'add' are not complete JSON") as caught:
        program.run(backend=plait.OpenAI("m", server.url))
    assert isinstance(caught.value.__cause__, plait.ConstraintFailed)
    server.close()


def test_begun_turns_are_sent_as_the_last_message() -> None:
    @plait.function
    def begun(s):
        s += user("Q") + assistant("It is " + gen("x"))

    server = chat_server({"choices": [{"delta": {"content": "so"}}]}, reason="stop")
    state = begun.run(backend=plait.OpenAI("m", server.url))
    (body,) = server.bodies("/chat/completions")
    assert body["messages"][-1] == {"role": "assistant", "content": "It is "}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert state.messages()[-1] == {"role": "assistant", "content": "It is so"}
    server.close()


def test_openais_own_service_continues_no_turns() -> None:
    assert not plait.OpenAI("m", api_key="k").continues_turns
    assert plait.OpenAI("m", "http://127.0.0.1:9").continues_turns


def test_other_constraints_are_no_tools() -> None:
    calls = [("<call>", {"type": "object"}, "</call>")]
    assert tool_calls(Structural(calls)) is None and tool_calls(None) is None

    @plait.function
    def structural(s):
        s += user("Q") + assistant(gen("x", constraint=Structural(calls)))

    with pytest.raises(plait.ProgramError, match="cannot express the constraint Structural"):
        structural.run(backend=plait.OpenAI("m", "http://127.0.0.1:9"))


def test_an_endpoint_refuses_calls_that_a_structural_tag_cannot_say() -> None:
    call = ("<call>", {"type": "object"}, "</call>")
    for spec in (
        Structural([call], separator=","),
        Structural([("<a>", Regex("x"), "</a>")]),
        Structural([call], openers=["<c"]),
    ):

        @plait.function
        def structural(s, spec=spec):
            s += user("Q") + assistant(gen("x", constraint=spec))

        server = servers.sglang(lambda text, body: "no call")
        with pytest.raises(plait.ProgramError, match="cannot express the constraint Structural"):
            structural.run(backend=plait.RuntimeEndpoint(server.url, chat_template="{{ messages[0].content }}"))
        server.close()


def test_an_endpoint_sends_a_structural_tag() -> None:
    server = servers.sglang(lambda text, body: "no call")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    state = program.run(backend=plait.RuntimeEndpoint(server.url, chat_template=template))
    assert state["step"] is None
    tag = json.loads(server.bodies("/generate")[0]["sampling_params"]["structural_tag"])
    assert tag["triggers"] == ["<tool_call>\n"] and tag["structures"][0]["begin"] == "<tool_call>\n"
    assert len(tag["structures"][0]["schema"]["anyOf"]) == 2
    server.close()
