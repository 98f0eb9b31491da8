"""Custom tools, namespaces and the items that agents send back, as Codex and OpenAI's SDK write them."""

from __future__ import annotations

import json
import re

import openai
import pytest
from scripted_server import ScriptedServer

from plait.runtime.messages import Append, Generate

NOTE = {"type": "custom", "name": "note", "description": "Keeps a note."}
LINES = {"type": "grammar", "syntax": "lark", "definition": "start: line+\nline: /[a-z ]{1,9}/ LF\n%import common.LF\n"}
CODE = {"type": "grammar", "syntax": "regex", "definition": r'(say "[a-z]{1,9}"\n){1,3}'}
FIND = {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [FIND, NOTE]}
ASK = {"model": "default", "input": "Please call a tool."}
CALLS = (
    "So.\n"
    '<tool_call>{"name": "crm.find", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "crm.note", "arguments": {"input": "a\\n\\"b\\" \\\\"}}</tool_call>'
)


def answered(text: str = CALLS) -> ScriptedServer:
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: text
    return server


def prompt_of(server: ScriptedServer) -> str:
    """The last prompt."""
    last = [request for request in server.scheduler.requests if isinstance(request, Append)][-1]
    return server.client.tokenizer.decode(list(last.token_ids))


def test_calls_have_name_and_namespace_apart() -> None:
    server = answered()
    response = server.post("/v1/responses", ASK | {"tools": [CRM]}).json()
    message, find, note = response["output"]
    assert message["content"][0]["text"] == "So."
    assert (find["type"], find["name"], find["namespace"]) == ("function_call", "find", "crm")
    assert (note["type"], note["name"], note["namespace"]) == ("custom_tool_call", "note", "crm")
    assert note["input"] == 'a\n"b" \\' and note["status"] == "completed"
    assert response["tools"] == [CRM | {"tools": [FIND | {"strict": None}, NOTE | {"format": None}]}]
    prompt = prompt_of(server)
    assert '"crm.find"' in prompt and '"Customers.\\nFinds."' in prompt and '"Keeps a note."' in prompt


def test_the_events_of_a_custom_call_add_up() -> None:
    body = ASK | {"tools": [NOTE, CRM], "stream": True}
    text = answered().post("/v1/responses", body).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    done = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert [event["input"] for event in done] == ['a\n"b" \\'] == ["".join(event["delta"] for event in deltas)]
    keys = ["type", "item_id", "output_index", "delta", "sequence_number"]
    assert all(list(event) == keys and event["output_index"] == 2 for event in deltas)
    (item,) = [event["item"] for event in events if event["type"].endswith("added") and event["output_index"] == 2][:1]
    assert item["input"] == "" and item["id"] == done[0]["item_id"] == events[-1]["response"]["output"][2]["id"]


def test_items_of_codex_are_read() -> None:
    """Items with ids, a phase, encrypted reasoning, and tools that stand in the input."""
    items = [
        {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [CRM]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "abc",
        },
        {
            "type": "message",
            "id": "msg_3",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "find", "namespace": "crm", "arguments": "{}"},
        {
            "type": "custom_tool_call",
            "id": "ctc_1",
            "status": "completed",
            "call_id": "2",
            "name": "note",
            "namespace": "crm",
            "input": 'a"\n',
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "1", "output": "found"},
        {
            "type": "custom_tool_call_output",
            "id": "ctco_1",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "ted"}],
        },
    ]
    server = answered("Fine.")
    body = {"model": "default", "input": items, "include": ["reasoning.encrypted_content"], "store": False}
    response = server.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    warnings = response.json()["warnings"]
    assert any("input[3].encrypted_content" in text for text in warnings)
    prompt = prompt_of(server)
    turn = re.search(r"<think>Hm\.</think>\s*Looking\.(.*?)\ntool\n", prompt, re.DOTALL)
    assert turn is not None, prompt
    assert turn[1] == (
        '<tool_call>{"name": "crm.find", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "crm.note", "arguments": {"input": "a\\"\\n"}}</tool_call>'
    )
    assert "found" in prompt and "noted" in prompt


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": {"type": "custom", "name": "note"}}, ["note"]),
        ({"tool_choice": {"type": "function", "name": "find"}}, ["crm.find"]),
        ({"tool_choice": {"type": "function", "name": "find", "namespace": "crm"}}, ["crm.find"]),
        ({"tool_choice": {"type": "function", "name": "crm.find"}}, ["crm.find"]),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "x"}]}},
            None,
        ),
    ],
)
def test_tool_choice_names_tools(fields, names) -> None:
    server = answered()
    tools = [NOTE | {"name": "note"}, CRM]
    answer = server.post("/v1/responses", ASK | {"tools": tools} | fields)
    if names is None:
        assert answer.json()["error"]["param"] == "tool_choice.tools"
        return
    (call,) = [request for request in server.scheduler.requests if isinstance(request, Generate)]
    assert [trigger.name for trigger in call.constraint.triggers] == names


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([NOTE, NOTE], "tools[1].name"),
        ([CRM, FIND | {"name": "crm.find"}], "tools[1].name"),
        ([NOTE | {"format": {"type": "grammar", "syntax": "gbnf", "definition": "a"}}], "tools[0].format.syntax"),
        ([NOTE | {"format": {"type": "grammar", "syntax": "regex"}}], "tools[0].format.definition"),
        ([CRM | {"tools": [CRM]}], "tools[0].tools[0].type"),
        ([FIND | {"name": f"f{n}"} for n in range(127)] + [CRM], "tools"),
    ],
)
def test_errors_name_the_tool(tools, param) -> None:
    error = answered().post("/v1/responses", ASK | {"tools": tools}).json()["error"]
    assert error["param"] == param


def test_a_model_writes_inputs_of_the_grammar(smollm) -> None:
    for form, pattern in ((LINES, r"([a-z ]{1,9}\n)+"), (CODE, CODE["definition"])):
        tool = NOTE | {"format": form}
        request = {**ASK, "tools": [tool, FIND], "tool_choice": {"type": "custom", "name": "note"}, "temperature": 1}
        response = smollm.responses.create(**request, max_output_tokens=80)
        (call,) = response.output
        assert call.type == "custom_tool_call" and call.name == "note"
        if response.status == "completed":
            assert re.fullmatch(pattern, call.input), call.input
        *_, last = smollm.responses.create(**request, max_output_tokens=80, stream=True)
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "kept"}
        history = [{"role": "user", "content": ASK["input"]}, call.model_dump(exclude_none=True), result]
        following = smollm.responses.create(model="default", input=history, tools=[tool, FIND], max_output_tokens=16)
        assert following.output and last.response.output[0].type == "custom_tool_call"
        assert following.usage.input_tokens_details.cached_tokens >= response.usage.input_tokens - 1


def test_a_wrong_grammar_is_refused(client) -> None:
    tool = NOTE | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, tools=[tool], tool_choice="required")
    assert caught.value.code == "invalid_constraint" and "no rule or terminal is named x" in caught.value.message
