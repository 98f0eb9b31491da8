"""Invalid chat requests: a 4xx in OpenAI's format names the parameter."""

from __future__ import annotations

import json

import httpx
import pytest

VALID = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
JSON = {"content-type": "application/json"}


def chat(**changes):
    return json.dumps(VALID | changes).encode()


def tool(**function):
    return chat(tools=[{"type": "function", "function": {"name": "f", **function}}], tool_choice="required")


INVALID = {
    "not JSON": (b"{", None),
    "empty": (b"", None),
    "an array": (b"[]", None),
    "NaN": (chat().replace(b'"temperature": 0', b'"temperature": NaN'), None),
    "infinity": (chat().replace(b'"temperature": 0', b'"temperature": 1e999'), None),
    "not UTF-8": (chat().replace(b"hi", b"\xff"), None),
    "a lone surrogate": (chat().replace(b"hi", b"\\ud800"), None),
    "a surrogate in UTF-8": (chat().replace(b"hi", b"\xed\xa0\x80"), None),
    "an integer beyond 64 bits": (chat(seed=2**63), None),
    "a very long integer": (chat().replace(b'"max_tokens": 1', b'"max_tokens": ' + b"9" * 5000), None),
    "deep": (b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "deep, where anything may stand": (tool(parameters=json.loads('{"not":' * 200 + "{}" + "}" * 200)), None),
    "a key twice": (chat()[:-1] + b', "model": "default"}', None),
    "a key very often": (chat()[:-1] + b', "model": "default"' * 100_000 + b"}", None),
    "a misspelt field": (chat(respones_format=1), "respones_format"),
    "an unknown field below": (chat(messages=[{"role": "user", "content": "a", "x": 1}]), "messages[0].x"),
    "no messages": (chat(messages=[]), "messages"),
    "no model": (json.dumps({"messages": VALID["messages"]}).encode(), "model"),
    "an unknown role": (chat(messages=[{"role": "robot", "content": "a"}]), "messages[0].role"),
    "no content": (chat(messages=[{"role": "user"}]), "messages[0].content"),
    "an image": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        "messages[0].content[0].type",
    ),
    "a result of no call": (
        chat(messages=[{"role": "tool", "tool_call_id": "x", "content": "1"}]),
        "messages[0].tool_call_id",
    ),
    "10,000 stop strings": (chat(stop=["a"] * 10_000), "stop"),
    "a stop string of 1 MB": (chat(stop="a" * 1_000_000), "stop"),
    "an empty stop string": (chat(stop=""), "stop"),
    "a boolean for a number": (chat(temperature=True), "temperature"),
    "a temperature below zero": (chat(temperature=-1), "temperature"),
    "top_p of zero": (chat(top_p=0), "top_p"),
    "top_k of zero": (chat(top_k=0), "top_k"),
    "max_tokens of zero": (chat(max_tokens=0), "max_tokens"),
    "both limits": (chat(max_completion_tokens=2), "max_tokens"),
    "min_tokens above max_tokens": (chat(min_tokens=2), "min_tokens"),
    "a bias of no token": (chat(logit_bias={"a": 1}), "logit_bias"),
    "a bias beyond the vocabulary": (chat(logit_bias={"49152": 1}), "logit_bias"),
    "a negative bias token": (chat(logit_bias={"-1": 1}), "logit_bias"),
    "a bias too strong": (chat(logit_bias={"1": 101}), "logit_bias"),
    "too many answers": (chat(n=10_000), "n"),
    "top_logprobs alone": (chat(top_logprobs=2), "top_logprobs"),
    "too many top_logprobs": (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "stream_options without stream": (chat(stream_options={"include_usage": True}), "stream_options"),
    "functions": (chat(functions=[]), "functions"),
    "an audio answer": (chat(modalities=["text", "audio"]), "modalities"),
    "a web search": (chat(web_search_options={}), "web_search_options"),
    "searched": (chat(web_search_options={}), "web_search_options"),
    "two constraints": (chat(regex="a", choices=["a"]), "choices"),
    "a wrong pattern": (chat(regex="("), "regex"),
    "an empty choice": (chat(choices=[""]), "choices"),
    "a wrong grammar": (chat(ebnf="root ::= ("), "ebnf"),
    "a grammar whose long texts cannot be parsed": (chat(ebnf='root ::= "a" root "b"? | ""'), "ebnf"),
    "a wrong schema": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}),
        "response_format.json_schema.schema",
    ),
    "a wrong tool": (tool(parameters={"type": 1}), "tools[0].function.parameters"),
    "a tool's wrong name": (tool(name="a b"), "tools[0].function.name"),
    "a choice of an unknown tool": (
        chat(
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice={"type": "function", "function": {"name": "g"}},
        ),
        "tool_choice.function.name",
    ),
    "a choice of no tools": (chat(tool_choice="required"), "tool_choice"),
    "continuing a question": (chat(continue_final_message=True), "continue_final_message"),
    "a cache salt that cannot be printed": (chat(cache_salt="\x00"), "cache_salt"),
    "a prompt far beyond the context": (chat(messages=[{"role": "user", "content": "a b " * 1_000_000}]), None),
    "a prompt beyond the context": (chat(messages=[{"role": "user", "content": "a b " * 9000}]), "messages"),
}


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_request_is_a_4xx_that_names_the_parameter(http, name, stream) -> None:
    body, param = INVALID[name]
    if stream and name != "stream_options without stream" and body.startswith(b'{"model": "default"'):
        body = b'{"stream": true, ' + body[1:]
    answer = http.post("/v1/chat/completions", content=body, headers=JSON)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["code"]
    assert error["param"] == param if param else True
    assert len(error["message"]) < 1000


def test_nul_and_other_unusual_characters_are_text(address) -> None:
    message = {"role": "user", "content": "\x00\u200b\U0001f600\x7f"}
    answer = httpx.post(f"{address}/v1/chat/completions", content=chat(messages=[message]), headers=JSON, timeout=60)
    assert answer.status_code == 200


def test_statuses_of_wrong_paths_methods_and_bodies(address) -> None:
    url = f"{address}/v1/chat/completions"
    assert httpx.post(url, content=chat(), headers={"content-type": "text/plain"}, timeout=60).status_code == 415
    assert (
        httpx.post(url, content=chat(model="gpt-4"), headers=JSON, timeout=60).json()["error"]["code"]
        == "model_not_found"
    )
    wrong_method = httpx.get(url, timeout=60)
    assert wrong_method.status_code == 405
    assert wrong_method.json()["error"]["message"] == "this endpoint takes POST, not GET"
    assert httpx.get(f"{address}/v2", timeout=60).json()["error"]["type"] == "not_found_error"
    large = b'{"model":"' + b"a" * (8 << 20) + b'"}'
    assert httpx.post(url, content=large, headers=JSON, timeout=60).status_code == 413
    assert httpx.post(url, content=iter([large]), headers=JSON, timeout=60).status_code == 413
    assert httpx.get(f"{address}/v1/models", timeout=60).headers["x-request-id"].startswith("req-")


def test_openapi_document_has_the_routes_and_their_schemas(address) -> None:
    document = httpx.get(f"{address}/openapi.json", timeout=60).json()
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"} <= set(
        document["paths"]
    )
    post = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "404", "413", "415", "500", "503", "504"} <= set(post["responses"])
    names = set(document["components"]["schemas"])
    text = json.dumps(document)
    assert all(part.split('"')[0] in names for part in text.split('"#/components/schemas/')[1:])
    assert "ChatRequest" in names and document["components"]["schemas"]["ChatRequest"]["additionalProperties"]
    options = document["components"]["schemas"]["OllamaOptions"]
    assert options["additionalProperties"] is False and "num_gpu" in options["properties"]
