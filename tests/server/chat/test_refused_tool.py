"""The error for a tool whose schema the compiler refuses names that tool, in every protocol that has tools."""

from __future__ import annotations

import pytest

ASK = [{"role": "user", "content": "hi"}]
GOOD = {"type": "object", "properties": {"city": {"type": "string"}}}
BAD = {"type": "object", "properties": {"city": {"type": "string", "pattern": r"(a)\1"}}}
SCHEMAS = [GOOD, GOOD, BAD]
NAMED = [{"name": name, "parameters": schema} for name, schema in zip("abc", SCHEMAS, strict=True)]
CALLED = [{"type": "function", "function": tool} for tool in NAMED]
REQUESTS = {
    "/v1/chat/completions": ({"messages": ASK, "tools": CALLED}, "tools[2].function.parameters"),
    "/v1/responses": (
        {"input": "hi", "tools": [{"type": "function", **tool} for tool in NAMED]},
        "tools[2].parameters",
    ),
    "/v1/messages": (
        {
            "messages": ASK,
            "max_tokens": 4,
            "tools": [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in NAMED],
        },
        "tools[2].input_schema",
    ),
    "/api/chat": ({"messages": ASK, "tools": CALLED}, "tools[2].function.parameters"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_the_error_names_the_tool(http, path, stream):
    fields, param = REQUESTS[path]
    answer = http.post(path, json={"model": "default", "stream": stream, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert "tool 'c'" in text and "/triggers/2/content/properties/city/pattern" in text, text
    if isinstance(error, dict) and "param" in error:  # Anthropic's and Ollama's errors have no field for it
        assert error["param"] == param


def test_the_answer_beside_calls_is_named_too(http):
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
    body = {"model": "default", "messages": ASK, "tools": CALLED[:2], "response_format": format_}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema", answer.text
