"""Tools beside a type on the embedded model: a valid call or a valid value, in the language and over HTTP."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import httpx
import jsonschema
import pytest
from asgi_server import serve_app

import plait
from plait import assistant, gen, system, user
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings


@dataclasses.dataclass
class Answer:
    verdict: Literal["yes", "no"]
    score: int


def look_up(word: str) -> str:
    """Looks up a word in a dictionary."""
    return f"{word}: unknown"


@plait.function
def step(s, begin="", **keywords):
    s += system("You help.", tools=[look_up])
    s += user("Is rain wet? Look it up, or answer as JSON.")
    s += assistant(begin + gen("step", tools=[look_up], type=Answer, max_tokens=48, **keywords))
    return s.call("step")


def test_every_text_is_a_valid_call_or_a_valid_value(runtime):
    states = step.run_batch([{}] * 12, backend=runtime, temperature=1.3, seed=3)
    kinds = {type(state["step"]).__name__ for state in states}
    assert kinds <= {"Answer", "ToolCall"}
    for state in states:
        is_value = isinstance(state["step"], Answer)
        assert (state.ret_value is None) == is_value
        assert is_value or state.ret_value.value == look_up(**state["step"].arguments)
        assert state.text_of("step").startswith("{" if is_value else "<tool_call>")


SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}
TOOL_SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 12}}, "required": ["word"]}


@pytest.fixture(scope="module")
def address(runtime):
    with serve_app(create_app(runtime, server_settings())) as address:
        yield address


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_answer_with_a_call_or_a_value(address, stream):
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Is rain wet? Look it up, or answer as JSON."}],
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": TOOL_SCHEMA}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
        **{"temperature": 1.3, "seed": 3, "n": 4, "max_tokens": 80, "stream": stream},
    }
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    for text, call, reason in _choices(response, stream):
        if reason == "tool_calls":
            assert not text
            jsonschema.validate(json.loads(call), TOOL_SCHEMA)
        elif reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert reason == "length"


def _choices(response, stream):
    """(text, arguments of the call, finish reason) of each choice."""
    if not stream:
        for choice in response.json()["choices"]:
            calls = choice["message"].get("tool_calls") or []
            arguments = calls[0]["function"]["arguments"] if calls else ""
            yield choice["message"]["content"] or "", arguments, choice["finish_reason"]
        return
    found = {}
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text, arguments, reason = found.get(choice["index"], ("", "", None))
                delta = choice["delta"]
                text += delta.get("content") or ""
                arguments += "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or [])
                found[choice["index"]] = (text, arguments, choice["finish_reason"] or reason)
    yield from found.values()
