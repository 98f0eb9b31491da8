"""The hints for unknown fields, and for fields that take one of a few values, of every protocol."""

from __future__ import annotations

import json

import pytest
from json_bodies import parse

from plait.runtime.server.errors import ApiError
from plait.runtime.server.fields.field_hints import NAMES_ELSEWHERE
from plait.runtime.server.protocols.anthropic.endpoint import MessagesRequest
from plait.runtime.server.protocols.ollama.generate import OllamaChatRequest, OllamaGenerateRequest
from plait.runtime.server.protocols.openai.chat_request import ChatRequest
from plait.runtime.server.protocols.openai.completions import CompletionRequest
from plait.runtime.server.protocols.openai.responses.types import ResponsesRequest
from plait.runtime.server.protocols.programs.endpoint import ProgramRequest
from plait.runtime.server.protocols.sglang.generate import GenerateRequest

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "default", "messages": MESSAGES}
KINDS = {
    ChatRequest: CHAT,
    CompletionRequest: {"model": "default", "prompt": "Hello"},
    ResponsesRequest: {"model": "default", "input": "Hello"},
    MessagesRequest: {**CHAT, "max_tokens": 4},
    OllamaChatRequest: CHAT,
    OllamaGenerateRequest: {"model": "default", "prompt": "Hello"},
    GenerateRequest: {"text": "Hello"},
    ProgramRequest: {"program": [{"text": "Hello"}]},
}


def message(kind, **fields):
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({**KINDS[kind], **fields}).encode(), kind)
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (ChatRequest, "guided_json", "write 'response_format'"),
        (ChatRequest, "guided_regex", "write 'regex'"),
        (ChatRequest, "guided_choice", "write 'choices'"),
        (ChatRequest, "guided_grammar", "write 'ebnf'"),
        (ResponsesRequest, "structured_outputs", "write 'text.format'"),
        (ChatRequest, "json_schema", "write 'response_format.json_schema'"),
        (ChatRequest, "max_new_tokens", "write 'max_completion_tokens'"),
        (ChatRequest, "temprature", "did you mean 'temperature'?"),
        (CompletionRequest, "guided_json", "write 'response_format'"),
        (CompletionRequest, "messages", "write 'prompt'"),
        (ResponsesRequest, "guided_json", "write 'text.format'"),
        (ResponsesRequest, "max_tokens", "write 'max_output_tokens'"),
        (MessagesRequest, "guided_json", "write 'output_config.format'"),
        (MessagesRequest, "stop", "write 'stop_sequences'"),
        (OllamaChatRequest, "guided_json", "write 'format'"),
        (OllamaGenerateRequest, "temperature", "write 'options.temperature'"),
        (OllamaGenerateRequest, "max_tokens", "write 'options.num_predict'"),
        (GenerateRequest, "guided_json", "write 'sampling_params.json_schema'"),
        (GenerateRequest, "max_new_tokens", "write 'sampling_params.max_new_tokens'"),
    ],
)
def test_an_unknown_field_names_the_one_that_does_it(kind, name, hint):
    assert message(kind, **{name: 1}) == f"unknown parameter: {name!r}; {hint}"


def test_fields_inside_of_objects_and_lists_have_hints():
    assert message(ChatRequest, messages=[{"role": "user", "contnt": "x"}]) == (
        "unknown parameter: 'messages[0].contnt'; did you mean 'content'?"
    )
    program = [{"text": "Hello"}, {"gen": {"name": "x", "guided_json": {}}}]
    assert message(ProgramRequest, program=program) == (
        "unknown parameter: 'program[1].gen.guided_json'; write 'json_schema'"
    )
    assert message(GenerateRequest, sampling_params={"max_tokens": 4}).endswith("; write 'max_new_tokens'")


def test_a_field_that_no_other_resembles_has_no_hint():
    for kind in KINDS:
        assert message(kind, xyzzy=1) == "unknown parameter: 'xyzzy'"
    assert message(ChatRequest, guided_decoding_backend="x") == "unknown parameter: 'guided_decoding_backend'"


def test_no_name_of_the_table_is_a_field_that_it_hides():
    """A name that an endpoint has is decoded there, so the table is not asked."""
    for name in ("max_tokens", "stop", "prompt"):
        assert name in NAMES_ELSEWHERE
    parse(json.dumps({**CHAT, "max_tokens": 4, "stop": "x"}).encode(), ChatRequest)


def test_a_field_of_few_values_lists_them():
    assert message(ChatRequest, response_format={"type": "json"}) == (
        "'response_format.type': Invalid value 'json': it must be one of 'text', 'json_object', 'json_schema'"
    )
    assert message(ChatRequest, messages=[{"role": "usr", "content": "x"}]).endswith(
        ": it must be one of 'system', 'developer', 'user', 'assistant', 'tool'"
    )
    assert message(ChatRequest, tool_choice="automatic").endswith(": it must be one of 'auto', 'none', 'required'")
    fork = {"fork": {"branches": [[{"text": "x"}]], "join": "all"}}
    assert message(ProgramRequest, program=[fork]).endswith(": it must be one of 'append', 'gather'")
