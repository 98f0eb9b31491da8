"""`warnings` beside the answers of every protocol, where a schema has formats that are not known."""

from __future__ import annotations

import json

import pytest
from answer_warnings import warnings_in, warnings_of_stream

import plait
from plait import gen
from plait.constrained import JsonSchema

SCHEMA = {
    "type": "object",
    "properties": {"c": {"type": "string", "format": "color", "maxLength": 2}},
    "required": ["c"],
    "additionalProperties": False,
}
WARNING = "the format 'color' at /properties/c/format is not known, so it is not enforced"
ASK = [{"role": "user", "content": "hi"}]
NAMED = {"name": "n", "schema": SCHEMA}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
LIMIT = {"model": "default", "max_tokens": 40}
OLLAMA = {"model": "default", "format": SCHEMA, "options": {"num_predict": 40}}
REQUESTS = {
    "/v1/chat/completions": LIMIT | FORMAT | {"messages": ASK},
    "/v1/completions": LIMIT | FORMAT | {"prompt": "hi"},
    "/v1/responses": {
        **{"model": "default", "input": "hi", "max_output_tokens": 40},
        "text": {"format": {"type": "json_schema", **NAMED}},
    },
    "/v1/messages": LIMIT | {"messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/api/chat": OLLAMA | {"messages": ASK},
    "/api/generate": OLLAMA | {"prompt": "hi"},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 40, "json_schema": json.dumps(SCHEMA)}},
    "/v1/programs": {"program": [{"text": "hi"}, {"gen": {"max_tokens": 40, "json_schema": SCHEMA}}]},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_answers_and_streams_have_the_warnings(http, path) -> None:
    answer = http.post(path, json=REQUESTS[path] | {"stream": False})
    assert answer.status_code == 200, answer.text
    assert warnings_in(answer.json()) == [[WARNING]]
    with http.stream("POST", path, json=REQUESTS[path] | {"stream": True}) as stream:
        assert warnings_of_stream("".join(stream.iter_text())) == [[WARNING]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_strict_formats_refuse_the_schema(http, path) -> None:
    answer = http.post(path, json=REQUESTS[path] | {"strict_formats": True})
    assert answer.status_code == 400 and "the format 'color' is not known" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "invalid_constraint"


def test_strict_formats_of_tools(http) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    body = LIMIT | {"messages": ASK, "tools": [tool], "tool_choice": "required"}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and len(answer.json()["warnings"]) == 1
    assert http.post("/v1/chat/completions", json=body | {"strict_formats": True}).status_code == 400


def test_known_formats_have_no_warnings(http) -> None:
    schema = SCHEMA | {"properties": {"c": {"type": "string", "format": "date"}}}
    body = LIMIT | {
        "messages": ASK,
        "response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": schema}},
    }
    assert "warnings" not in http.post("/v1/chat/completions", json=body).json()


def test_a_gen_has_the_warnings_in_its_meta_info(engine, capfd) -> None:
    @plait.function
    def program(s, spec):
        s += "hi" + gen("x", max_tokens=40, constraint=spec)

    for _ in range(2):
        assert program.run(JsonSchema(SCHEMA), backend=engine).get_meta_info("x")["warnings"] == [WARNING]
    assert capfd.readouterr().err.count(WARNING) == 1, "one line in the log"
    with pytest.raises(plait.ProgramError, match="the format 'color' is not known"):
        program.run(JsonSchema(SCHEMA, strict_formats=True), backend=engine)
    assert "warnings" not in program.run(JsonSchema({"type": "null"}), backend=engine).get_meta_info("x")


def test_a_resumed_state_has_the_warnings(engine, tmp_path) -> None:
    @plait.function
    def program(s):
        s += "hi" + gen("x", max_tokens=40, json_schema=SCHEMA)

    file = tmp_path / "batch.jsonl"
    for _ in range(2):
        (state,) = program.run_batch([{}], backend=engine, resume=file)
        assert state.get_meta_info("x")["warnings"] == [WARNING]


def test_openapi_documents_the_field(http) -> None:
    document = http.get("/openapi.json").json()
    assert "warnings" in document["components"]["schemas"]["ChatCompletion"]["properties"]
