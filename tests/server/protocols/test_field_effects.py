"""Every honoured field of a request has an effect: on what reaches the scheduler, or on the answer.

EFFECTS has one entry for each field of each request: a value, and what it changes against the same request without it.
A field without an entry fails. Fields of the table in request_fields.py are refused by name, or change nothing but the
answer's warnings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_server import ScriptedServer

from plait.runtime.messages import Append, Embed, Generate, Open
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.fields.request_fields import rows_of
from plait.runtime.server.protocols.anthropic import request as anthropic
from plait.runtime.server.protocols.ollama import embed as ollama_embed
from plait.runtime.server.protocols.ollama import request as ollama
from plait.runtime.server.protocols.openai import chat_request, completions, embeddings
from plait.runtime.server.protocols.openai.responses import types as responses_types
from plait.runtime.server.protocols.sglang import types as sglang

ANSWER = "<think>hm</think>\n\nSome text."
ASK = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
CLAUDE_TOOL = {"name": "f", "input_schema": PARAMETERS}
TAG = '{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}'
UNTAGGED = '{"name": "f", "arguments": {}}'  # a call without marks, the answer to ASK_UNTAGGED
ASK_UNTAGGED = [{"role": "user", "content": "untagged"}]
NO_EFFECT = "none"
REFUSED = "refused"


@dataclass(frozen=True)
class Effect:
    """`value` changes `on`, in a request that also has the fields `beside`.

    on: a field of SamplingParams, "prompt", "constraint", "calls", "cache_salt", "priority", "embed", "answer", or
    "refused" (the value is an error). "none": a label that the docs list as accepted without effect.
    """

    value: Any
    on: str
    beside: dict[str, Any] = field(default_factory=dict)


def sampling(names: dict[str, str], **values: Any) -> dict[str, Effect]:
    """Effects of fields that set the sampling parameter of their name, or of the name in `names`."""
    return {name: Effect(value, names.get(name, name)) for name, value in values.items()}


LOGPROBS = {"logprobs": True}
NAMED = {"name": "n", "schema": PARAMETERS}
OPENAI = {
    "model": Effect("other", REFUSED),
    "max_tokens": Effect(3, "max_tokens"),
    "n": Effect(2, "calls"),
    "stream": Effect(True, "answer"),
    "stream_options": Effect({"include_usage": True}, "answer", {"stream": True}),
    "user": Effect("u", NO_EFFECT),
    "response_format": Effect({"type": "json_object"}, "constraint"),
    "structured_outputs": Effect({"regex": "a+"}, "constraint"),
    "usage": Effect({"include": True}, "answer", {"stream": True}),
    "regex": Effect("a+", "constraint"),
    "ebnf": Effect('root ::= "a"', "constraint"),
    "lark": Effect('start: "a"', "constraint"),
    "choices": Effect(["a", "b"], "constraint"),
    "cache_salt": Effect("s", "cache_salt"),
    "priority": Effect(2, "priority"),
    "complete": Effect(True, "complete", {"regex": "a+"}),
    "repeat_last_n": Effect(64, "repeat_last_n", {"repetition_penalty": 1.5}),
    "exact": Effect(True, "exact", {"regex": "a+"}),
    "particles": Effect(8, "particles", {"regex": "a+"}),
    "compact": Effect(True, "constraint", {"response_format": {"type": "json_object"}}),
    "strict_formats": Effect(True, "constraint", {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    **sampling(
        {"timeout": "timeout_s"},
        min_tokens=2,
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        typical_p=0.7,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.5,
        stop=["x"],
        stop_token_ids=[5],
        ignore_eos=True,
        token_healing=True,
        seed=7,
        logit_bias={"5": 1.0},
        timeout=9.0,
        stop_regex="a+b",
    ),
}
CHAT = OPENAI | {
    "messages": Effect([{"role": "user", "content": "other"}], "prompt"),
    "logprobs": Effect(True, "logprobs"),
    "top_logprobs": Effect(2, "top_logprobs", LOGPROBS),
    "max_completion_tokens": Effect(3, "max_tokens"),
    "tools": Effect([CHAT_TOOL], "prompt"),
    "tool_choice": Effect("required", "constraint", {"tools": [CHAT_TOOL]}),
    "parallel_tool_calls": Effect(False, "constraint", {"tools": [CHAT_TOOL]}),
    "continue_final_message": Effect(True, "prompt", {"messages": [*ASK, {"role": "assistant", "content": "So"}]}),
    "add_generation_prompt": Effect(False, "prompt"),
    "chat_template_kwargs": Effect({"enable_thinking": False}, "prompt"),
    "enable_thinking": Effect(False, "prompt"),
    "reasoning_effort": Effect("low", "constraint"),
    "thinking": Effect({"type": "enabled", "budget_tokens": 9}, "constraint"),
    "include_reasoning": Effect(False, "answer"),
    "untagged_tool_calls": Effect(True, "answer", {"messages": ASK_UNTAGGED, "tools": [CHAT_TOOL]}),
    "reasoning": Effect({"max_tokens": 9}, "constraint", {"response_format": {"type": "json_object"}}),
    "safety_identifier": Effect("u", NO_EFFECT),
    "prompt_cache_key": Effect("k", NO_EFFECT),
}
SPECIAL = {"prompt": "<|im_end|>"}
COMPLETIONS = OPENAI | {
    "prompt": Effect("other", "prompt"),
    "parse_special": Effect(False, "prompt", SPECIAL),
    "best_of": Effect(2, "calls"),
    "echo": Effect(True, "answer"),
    "logprobs": Effect(2, "top_logprobs"),
    "suffix": Effect("x", REFUSED),
}
RESPONSES = {
    "model": Effect("other", REFUSED),
    "input": Effect("other", "prompt"),
    "instructions": Effect("Be brief.", "prompt"),
    "include": Effect(["message.output_text.logprobs"], "logprobs"),
    "max_output_tokens": Effect(3, "max_tokens"),
    "metadata": Effect({"a": "b"}, "answer"),
    "parallel_tool_calls": Effect(False, "constraint", {"tools": [{"type": "function", **FUNCTION}]}),
    "safety_identifier": Effect("u", NO_EFFECT),
    "prompt_cache_key": Effect("k", NO_EFFECT),
    "stream": Effect(True, "answer"),
    "stream_options": Effect({"include_obfuscation": True}, "answer", {"stream": True}),
    "reasoning": Effect({"effort": "low"}, "constraint"),
    "previous_response_id": Effect("resp_1", REFUSED),  # see responses/test_stored_responses.py
    "store": Effect(True, "answer"),
    "text": Effect({"format": {"type": "json_object"}}, "constraint"),
    "tool_choice": Effect("required", "constraint", {"tools": [{"type": "function", **FUNCTION}]}),
    "tools": Effect([{"type": "function", **FUNCTION}], "prompt"),
    "user": Effect("u", "answer"),
    "cache_salt": Effect("s", "cache_salt"),
    "priority": Effect(2, "priority"),
    "complete": Effect(False, "complete", {"text": {"format": {"type": "json_object"}}}),
    "exact": Effect(True, "exact", {"text": {"format": {"type": "json_object"}}}),
    "particles": Effect(8, "particles", {"text": {"format": {"type": "json_object"}}}),
    "compact": Effect(True, "constraint", {"text": {"format": {"type": "json_object"}}}),
    "chat_template_kwargs": Effect({"enable_thinking": False}, "prompt"),
    "enable_thinking": Effect(False, "prompt"),
    "untagged_tool_calls": Effect(True, "answer", {"input": "untagged", "tools": [{"type": "function", **FUNCTION}]}),
    "strict_formats": Effect(True, "constraint", {"text": {"format": {"type": "json_schema", **NAMED}}}),
    **sampling({"timeout": "timeout_s"}, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, stop=["x"], seed=7),
    **sampling({}, typical_p=0.7),
    **sampling({"timeout": "timeout_s"}, top_logprobs=2, timeout=9.0, repetition_penalty=1.5, ignore_eos=True),
}
INPUT_TOKENS = {
    "model": Effect("other", REFUSED),
    "input": Effect("other words", "answer"),
    "instructions": Effect("Be brief.", "answer"),
    "parallel_tool_calls": Effect(False, NO_EFFECT),  # nor has it one on the prompt of a response
    "previous_response_id": Effect("resp_1", REFUSED),
    "reasoning": Effect({"summary": "auto"}, "answer"),  # a warning
    "text": Effect({"verbosity": "low"}, "answer"),  # a warning
    "tools": Effect([{"type": "function", **FUNCTION}], "answer"),
    "tool_choice": Effect("required", REFUSED),  # without tools
    "chat_template_kwargs": Effect({"enable_thinking": False}, "answer"),
    "enable_thinking": Effect(False, "answer"),
}
CLAUDE_PROMPT = {
    "model": Effect("other", REFUSED),
    "messages": Effect([{"role": "user", "content": "other words"}], "prompt"),
    "system": Effect("Be brief.", "prompt"),
    "tools": Effect([CLAUDE_TOOL], "prompt"),
    "tool_choice": Effect({"type": "any"}, "constraint", {"tools": [CLAUDE_TOOL]}),
    "thinking": Effect({"type": "adaptive"}, "answer"),
    "output_config": Effect({"format": {"type": "json_schema", "schema": PARAMETERS}}, "constraint"),
    "cache_control": Effect({"type": "ephemeral"}, NO_EFFECT),
    "chat_template_kwargs": Effect({"enable_thinking": False}, "prompt"),
}
MESSAGES = CLAUDE_PROMPT | {
    "max_tokens": Effect(3, "max_tokens"),
    "stream": Effect(True, "answer"),
    "untagged_tool_calls": Effect(True, "answer", {"messages": ASK_UNTAGGED, "tools": [CLAUDE_TOOL]}),
    "metadata": Effect({"user_id": "u"}, NO_EFFECT),
    **sampling({"stop_sequences": "stop"}, stop_sequences=["x"], temperature=0.5, top_p=0.5, top_k=3),
}
# A count is of the prompt: fields that only change the answer of /v1/messages are checked, and refused where they are
# refused there.
COUNT_TOKENS = {
    "model": Effect("other", REFUSED),
    "messages": Effect([{"role": "user", "content": "other words"}], "answer"),
    "system": Effect("Be brief.", "answer"),
    "tools": Effect([CLAUDE_TOOL], "answer"),
    "tool_choice": Effect({"type": "any"}, REFUSED),  # without tools
    "thinking": Effect({"type": "disabled"}, "answer"),
    "output_config": Effect({"effort": "high"}, "answer"),  # a warning, without thinking
    "cache_control": Effect({"type": "ephemeral"}, NO_EFFECT),
    "chat_template_kwargs": Effect({"enable_thinking": False}, "answer"),
}
OLLAMA = {
    "model": Effect("other", REFUSED),
    "format": Effect("json", "constraint"),
    "options": Effect({"temperature": 0.5}, "temperature"),
    "stream": Effect(True, "answer"),
    "keep_alive": Effect("5m", NO_EFFECT),
    "think": Effect(False, "answer"),
    "chat_template_kwargs": Effect({"enable_thinking": False}, "prompt"),
    "logprobs": Effect(True, "logprobs"),
    "top_logprobs": Effect(2, "top_logprobs", LOGPROBS),
}
OPTIONS = {
    "repeat_last_n": Effect(64, "repeat_last_n", {"repeat_penalty": 1.5}),
    "num_ctx": Effect(1 << 30, REFUSED),
    "exact": Effect(True, REFUSED),  # without a format
    "particles": Effect(8, REFUSED),  # without a format
    **sampling(
        {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"},
        num_predict=3,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        typical_p=0.7,
        seed=7,
        stop=["x"],
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repeat_penalty=1.5,
    ),
}
SGLANG_SAMPLING = {
    "exact": Effect(True, "exact", {"regex": "a+"}),
    "particles": Effect(8, "particles", {"regex": "a+"}),
    "n": Effect(2, "calls"),
    "json_schema": Effect('{"type": "null"}', "constraint"),
    "regex": Effect("a+", "constraint"),
    "ebnf": Effect('root ::= "a"', "constraint"),
    "structural_tag": Effect(TAG, "constraint"),
    "skip_special_tokens": Effect(False, "answer"),
    **sampling(
        {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"},
        max_new_tokens=3,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        typical_p=0.7,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.5,
        stop=["x"],
        stop_token_ids=[5],
        ignore_eos=True,
        token_healing=True,
        sampling_seed=7,
        logit_bias={"5": 1.0},
        stop_regex="a+b",
    ),
}
RETURNS = {"return_logprob": True}
SGLANG = {
    "model": Effect("other", REFUSED),
    "text": Effect("other", "prompt"),
    "parse_special": Effect(False, "prompt", {"text": "<|im_end|>"}),
    "input_ids": Effect([5, 6], "prompt", {"text": None, "input_ids": [7]}),
    "sampling_params": Effect({"max_new_tokens": 3}, "max_tokens"),
    "rid": Effect("mine", "answer"),
    "return_logprob": Effect(True, "logprobs"),
    "logprob_start_len": Effect(0, "prompt_logprobs_from", RETURNS),
    "top_logprobs_num": Effect(2, "top_logprobs", RETURNS),
    "return_text_in_logprobs": Effect(True, "answer", RETURNS),
    "stream": Effect(True, "answer"),
    "priority": Effect(2, "priority"),
    "extra_key": Effect("s", "cache_salt"),
    "cache_salt": Effect("s", "cache_salt"),
    "timeout": Effect(9.0, "timeout_s"),
}
EMBEDDINGS = {
    "model": Effect("other", REFUSED),
    "input": Effect("other", "prompt"),
    "dimensions": Effect(2, "embed"),
    "encoding_format": Effect("base64", "answer"),
    "user": Effect("u", NO_EFFECT),
    "cache_salt": Effect("s", "cache_salt"),
    "priority": Effect(2, "priority"),
    "timeout": Effect(9.0, "embed"),
}
OLLAMA_EMBED = {
    "model": Effect("other", REFUSED),
    "input": Effect("other", "prompt"),
    "truncate": Effect(False, REFUSED, {"options": {"num_ctx": 1}}),
    "dimensions": Effect(2, "embed"),
    "options": Effect({"num_ctx": 1}, "prompt"),
    "keep_alive": Effect("5m", NO_EFFECT),
}
OLD_EMBED = {
    "model": Effect("other", REFUSED),
    "prompt": Effect("other", "prompt"),
    "options": Effect({"num_ctx": 1}, "prompt"),
    "keep_alive": Effect("5m", NO_EFFECT),
}
ASKED = {"model": "default", "messages": ASK}
PROMPTED = {"model": "default", "prompt": "hi"}
INPUT = {"model": "default", "input": "hi"}


@dataclass(frozen=True)
class Endpoint:
    """A request's struct, the least request, and the effects of its fields."""

    struct: Any
    base: dict[str, Any]
    effects: dict[str, Effect]


# after "#": the part of the request that has these fields
ENDPOINTS = {
    "/v1/chat/completions": Endpoint(chat_request.ChatRequest, ASKED, CHAT),
    "/v1/completions": Endpoint(completions.CompletionRequest, PROMPTED, COMPLETIONS),
    "/v1/responses": Endpoint(responses_types.ResponsesRequest, INPUT, RESPONSES),
    "/v1/responses/input_tokens": Endpoint(responses_types.ResponsePrompt, INPUT, INPUT_TOKENS),
    "/v1/messages": Endpoint(anthropic.MessagesRequest, ASKED | {"max_tokens": 99}, MESSAGES),
    "/v1/messages/count_tokens": Endpoint(anthropic.PromptFields, ASKED, COUNT_TOKENS),
    "/api/chat": Endpoint(
        ollama.OllamaChatRequest,
        ASKED | {"stream": False},
        OLLAMA
        | {
            "messages": Effect([{"role": "user", "content": "other"}], "prompt"),
            "tools": Effect([CHAT_TOOL], "prompt"),
            "tool_choice": Effect("required", "constraint", {"tools": [CHAT_TOOL]}),
            **sampling({"max_output_tokens": "max_tokens"}, temperature=0.5, top_p=0.5, max_output_tokens=3),
        },
    ),
    "/api/generate": Endpoint(
        ollama.OllamaGenerateRequest,
        PROMPTED | {"stream": False},
        OLLAMA
        | {
            "prompt": Effect("other", "prompt"),
            "system": Effect("Be brief.", "prompt"),
            "raw": Effect(True, "prompt"),
            "suffix": Effect("x", REFUSED),  # by a model without marks for it
        },
    ),
    "/api/chat#options": Endpoint(ollama.OllamaOptions, ASKED | {"stream": False}, OPTIONS),
    "/generate": Endpoint(sglang.GenerateRequest, {"text": "hi"}, SGLANG),
    "/generate#sampling_params": Endpoint(sglang.SglangSamplingParams, {"text": "hi"}, SGLANG_SAMPLING),
    "/v1/embeddings": Endpoint(embeddings.EmbeddingRequest, INPUT, EMBEDDINGS),
    "/api/embed": Endpoint(ollama_embed.EmbedRequest, INPUT, OLLAMA_EMBED),
    "/api/embeddings": Endpoint(ollama_embed.LegacyEmbedRequest, PROMPTED, OLD_EMBED),
}
HONOURED = [(path, name) for path, endpoint in ENDPOINTS.items() for name in endpoint.effects]
LISTED = [
    (path, name, row, is_advice)
    for path, endpoint in ENDPOINTS.items()
    for name, (row, is_advice) in rows_of(endpoint.struct.field_table).items()
    if name not in endpoint.struct.__struct_fields__
]


@pytest.fixture(scope="module")
def server() -> ScriptedServer:
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: UNTAGGED if "untagged" in prompt else ANSWER
    return server


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_has_an_entry(path: str) -> None:
    endpoint = ENDPOINTS[path]
    fields, entries = set(endpoint.struct.__struct_fields__), endpoint.effects.keys()
    missing, unknown = sorted(fields - entries), sorted(entries - fields)
    assert not missing, f"add {missing} of {path} to its table of effects in this file"
    assert not unknown, f"{unknown} in the table of {path} are no fields of {endpoint.struct.__name__}"


@pytest.mark.parametrize(("path", "name"), HONOURED)
def test_every_field_has_its_effect(server: ScriptedServer, path: str, name: str) -> None:
    endpoint = ENDPOINTS[path]
    effect = endpoint.effects[name]
    without = observe(server, path, endpoint.base, effect.beside)
    assert without["status"] == 200, without
    with_field = observe(server, path, endpoint.base, effect.beside | {name: effect.value})
    changed = {aspect for aspect in without.keys() | with_field.keys() if without.get(aspect) != with_field.get(aspect)}
    if effect.on == REFUSED:
        assert with_field["status"] == (404 if name == "model" else 400), with_field
        assert name in with_field["answer"] or name in ("truncate", "stream_options"), with_field
    elif effect.on == NO_EFFECT:
        assert not changed
    else:
        assert with_field["status"] == 200, with_field
        assert effect.on in changed, f"{name} changed {sorted(changed)}"


@pytest.mark.parametrize(("path", "name", "row", "is_advice"), LISTED)
def test_listed_fields_are_refused_or_become_warnings(server, path, name, row, is_advice) -> None:
    base = ENDPOINTS[path].base
    seen, without = observe(server, path, base, {name: {"no": "such value"}}), observe(server, path, base, {})
    if is_advice:
        answer, warnings = seen.pop("answer"), f"{name}' has no effect: {row.reason}"
        assert answer.count(warnings) == 1 and '"warnings":["' in answer
        without.pop("answer")
        assert seen == without
    else:
        assert seen["status"] == 400 and name in seen["answer"] and row.reason in seen["answer"], seen
    for value in (None, *row.neutral):
        neutral = observe(server, path, base, {name: value})
        assert neutral["status"] == 200 and "warnings" not in neutral["answer"], neutral


def observe(server: ScriptedServer, path: str, base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """What a request sends to the scheduler, and its answer without ids and times."""
    server.scheduler.requests.clear()
    server.scheduler.sessions.clear()
    path, _, part = path.partition("#")
    answer = server.post(path, base | ({part: fields} if part else fields))
    calls, sent = server.scheduler.sent(Generate), server.scheduler.sent
    seen: dict[str, Any] = {
        "status": answer.status_code,
        "answer": _without_ids(answer.text),
        "calls": len(calls),
        "constraint": [call.constraint for call in calls[:1]],
        "prompt": [token for append in sent(Append) for token in append.token_ids],
        "cache_salt": [request.cache_salt for request in sent(Open)],
        "priority": [request.priority for request in sent(Open)],
        "embed": [(embed.dimensions, embed.timeout_s) for embed in sent(Embed)],
    }
    return seen | {name: getattr(calls[0].sampling, name) for name in SamplingParams.__struct_fields__ if calls}


def _without_ids(text: str) -> str:
    text = re.sub(r'"(created|created_at|completed_at|\w+_duration|\w+_latency)":("[^"]*"|[\d.e-]+)', "", text)
    return re.sub(r"(chatcmpl-|cmpl-|[a-z]+_|req-)[0-9a-f]{12,}", "", text)
