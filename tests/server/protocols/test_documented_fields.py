"""Every field that a client package can send is acted on, refused by name, or listed in the warnings of the answer.

Fields and values come from the packages' own types, so a new release with more fields fails here until they are
supported or in the table of request_fields.py. SGLang's come from its documentation. The packages are imported when the
tests run: with Anthropic's three thousand modules each worker would take seconds more to collect the tests.
"""

from __future__ import annotations

import json
import pkgutil

import pytest
from answer_warnings import warnings_of_stream
from typed_dict_samples import fields_of, samples

from plait.runtime.server.fields.request_fields import rows_of

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"name": "x", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FEW = {"num_predict": 2}
SAMPLED = {"temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "max_tokens", "n"}
SAMPLED |= {"logprobs", "logit_bias", "stream_options", "user"}
CLAUDES = {"messages", "model", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"}
LLAMAS = {"model", "stream", "options", "format", "keep_alive", "think", "logprobs", "top_logprobs"}

# path, and after "#" the part of the request with these fields:
# (the name of a type, the rest of a request, fields that are acted on); the others are rows of request_fields.py
ENDPOINTS = {
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params:CompletionCreateParamsBase",
        {"model": "default", "messages": ASK, "max_tokens": 2},
        SAMPLED
        | {"messages", "model", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice"}
        | {"reasoning_effort"}
        | {"parallel_tool_calls", "prompt_cache_key", "safety_identifier"},
    ),
    "/v1/completions": (
        "openai.types.completion_create_params:CompletionCreateParamsBase",
        {"model": "default", "prompt": "hi", "max_tokens": 2},
        SAMPLED | {"prompt", "model", "best_of", "echo"},
    ),
    "/v1/responses": (
        "openai.types.responses.response_create_params:ResponseCreateParamsBase",
        {"model": "default", "input": "hi", "max_output_tokens": 2},
        {
            "input",
            "instructions",
            "model",
            "store",
            "include",
            "max_output_tokens",
            "metadata",
            "parallel_tool_calls",
            "user",
        }
        | {"safety_identifier", "prompt_cache_key", "temperature", "text", "tool_choice", "tools", "top_logprobs"}
        | {"top_p", "reasoning", "stream_options"},
    ),
    "/v1/responses/input_tokens": (
        "openai.types.responses.input_token_count_params:InputTokenCountParams",
        {"model": "default", "input": "hi"},
        {"input", "instructions", "model", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools"},
    ),
    "/v1/messages": (
        "anthropic.types.message_create_params:MessageCreateParamsBase",
        {"model": "default", "messages": ASK, "max_tokens": 2},
        CLAUDES | {"max_tokens", "stop_sequences", "metadata"},
    ),
    "/v1/messages/count_tokens": (
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
        {"model": "default", "messages": ASK},
        CLAUDES,
    ),
    "/api/chat": (
        "ollama._types:ChatRequest",
        {"model": "default", "messages": ASK, "stream": False, "options": FEW},
        LLAMAS | {"messages", "tools"},
    ),
    "/api/generate": (
        "ollama._types:GenerateRequest",
        {"model": "default", "prompt": "hi", "stream": False, "options": FEW},
        LLAMAS | {"prompt", "system", "raw"},
    ),
    "/generate": (
        "sglang_request_types:Generate",
        {"text": "hi there", "sampling_params": {"max_new_tokens": 2}},
        {"text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"}
        | {"return_text_in_logprobs", "stream"},
    ),
    "/generate#sampling_params": (
        "sglang_request_types:Sampling",
        {"max_new_tokens": 2},
        {"max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "n"}
        | {"frequency_penalty", "presence_penalty", "min_new_tokens", "json_schema", "regex", "ebnf", "ignore_eos"}
        | {"repetition_penalty", "structural_tag"}
        | {"skip_special_tokens", "logit_bias", "sampling_seed"},
    ),
    "/v1/embeddings": (
        "openai.types.embedding_create_params:EmbeddingCreateParams",
        {"model": "default", "input": "hi"},
        {"model", "input", "dimensions", "encoding_format", "user"},
    ),
    "/api/embed": (
        "ollama._types:EmbedRequest",
        {"model": "default", "input": "hi"},
        {"model", "input", "truncate", "dimensions", "options", "keep_alive"},
    ),
    "/api/embeddings": (
        "ollama._types:EmbeddingsRequest",
        {"model": "default", "prompt": "hi"},
        {"model", "prompt", "options", "keep_alive"},
    ),
}
# fields that another field needs, and values that a type does not tell
REQUIRED_WITH = {
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "max_completion_tokens"): {"max_tokens": None},
    ("/v1/chat/completions", "tool_choice"): {"tools": [{"type": "function", "function": TOOL}]},
    ("/v1/responses", "tool_choice"): {"tools": [{"type": "function", **TOOL}]},
    ("/v1/responses/input_tokens", "tool_choice"): {"tools": [{"type": "function", **TOOL}]},
    ("/v1/messages", "tool_choice"): {"tools": [{"name": "x", "input_schema": TOOL["parameters"]}]},
    ("/api/chat", "top_logprobs"): {"logprobs": True},
    ("/api/generate", "top_logprobs"): {"logprobs": True},
    ("/generate", "input_ids"): {"text": None},
    ("/generate", "logprob_start_len"): {"return_logprob": True},
    ("/generate", "top_logprobs_num"): {"return_logprob": True},
    ("/generate", "return_text_in_logprobs"): {"return_logprob": True},
}
EXTRA_VALUES = {"messages": [ASK], "logit_bias": [{"5": 1}], "model": ["default"], "think": [False]}
EXTRA_VALUES |= {"sampling_params": [{"max_new_tokens": 1}], "json_schema": ['{"type": "null"}']}
EXTRA_VALUES |= {"ebnf": ['root ::= "a"']}
STRUCTURE = {"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}
TAG = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<f>"]}
EXTRA_VALUES |= {"structural_tag": [json.dumps(TAG)]}
TABLES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/api/chat": "ollama_chat",
    "/api/generate": "ollama_generate",
    "/generate": "generate",
    "/generate#sampling_params": "sampling_params",
    "/v1/embeddings": "embeddings",
    "/api/embed": "ollama_embed",
    "/api/embeddings": "ollama_embed",
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_is_acted_on_refused_or_listed(http, path):
    typed = pkgutil.resolve_name(ENDPOINTS[path][0])
    assert len(fields_of(typed)) > 1
    for name in fields_of(typed):
        check_field(http, path, typed, name)


def check_field(http, path, typed, name):
    _, base, supported = ENDPOINTS[path]
    row, is_advice = rows_of(TABLES[path]).get(name, (None, False))
    request = base | REQUIRED_WITH.get((path, name), {}) | ({"stream": True} if name == "stream_options" else {})
    accepted, listed = [], []
    for value in values_of(path, typed, name):
        answer = ask(http, path, request | {name: value})
        if answer.status_code == 200:
            accepted.append(value)
            texts = [text for texts in warnings_of_stream(answer.text) for text in texts]
            assert not any("not known here" in text for text in texts), texts
            listed += [value] if any(f"{name}' has no effect" in text for text in texts) else []
        else:
            assert answer.status_code == (404 if name == "model" else 400), (value, answer.text)
            error = answer.json()["error"]
            assert blamed_field(error, path) == name or name in error_text(error), answer.text
            assert "unknown parameter: " + repr(name) not in error_text(error), answer.text
    if name in supported:
        assert row is None and accepted, "a supported field is refused with every value"
        return
    others = [value for value in values_of(path, typed, name) if value not in (row.neutral if row else ())]
    assert (listed == others) if is_advice else not set(map(str, accepted)) & set(map(str, others))


def ask(http, path, fields):
    path, _, part = path.partition("#")
    return http.post(path, json={"text": "hi there", part: fields} if part else fields)


def values_of(path, typed, name):
    """The distinct sample values of a field. Null is left out: it means no value."""
    kind = fields_of(typed)[name]
    values = [] if name == "model" else [sample.value for sample in samples(kind) if sample.value is not None]
    if name == "options" and path not in (
        "/api/embed",
        "/api/embeddings",
    ):  # without a limit an answer may fill the context
        values = [value | FEW if value.get("num_predict") is None else value for value in values]
    return [json.loads(text) for text in dict.fromkeys(map(json.dumps, values + EXTRA_VALUES.get(name, [])))]


def blamed_field(error, path):
    """The field that `param` of OpenAI's error format names."""
    param = (error.get("param") if isinstance(error, dict) else None) or ""
    part = path.partition("#")[2]
    return param.removeprefix(f"{part}.").partition(".")[0].partition("[")[0]


def error_text(error):
    """The message, in any protocol's format."""
    return error["message"] if isinstance(error, dict) else error
