"""Fields without a meaning are listed in the answer's warnings, streamed or not, once; near misses are refused.

The bodies of agents and libraries have their structure, and text of our own.
"""

from __future__ import annotations

import pytest
from answer_warnings import warnings_of_stream
from scripted_server import ScriptedServer

from plait.runtime.messages import Append, Generate
from plait.runtime.server.fields.request_fields import ADVICE as ADVICE_ROWS
from plait.runtime.server.fields.request_fields import ENDPOINTS, PARTS, REFUSED
from plait.runtime.server.fields.request_warnings import MAX_WARNINGS

ASK = [{"role": "user", "content": "hi"}]
CHAT = {"model": "default", "messages": ASK}
BODIES = {
    "/v1/chat/completions": CHAT | {"n": 2},
    "/v1/completions": {"model": "default", "prompt": ["hi", "ho"]},
    "/v1/responses": {"model": "default", "input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 99},
    "/api/chat": CHAT,
    "/api/generate": {"model": "default", "prompt": "hi"},
    "/generate": {"text": ["hi", "ho"]},
    "/v1/programs": {"program": [{"text": "hi"}, {"gen": {"name": "a", "n": 2}}]},
}
UNSTREAMED = {
    "/v1/responses/input_tokens": {"model": "default", "input": "hi"},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"model": "default", "input": "hi"},
    "/api/embed": {"model": "default", "input": "hi"},
    "/api/embeddings": {"model": "default", "prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
CASES = [(path, stream) for path in BODIES for stream in (False, True)] + [(path, None) for path in UNSTREAMED]
ADVICE = {  # a field of each endpoint that has some
    "/v1/chat/completions": {"store": True},
    "/v1/completions": {"provider": {"order": ["x"]}},
    "/v1/responses": {"truncation": "auto"},
    "/v1/responses/input_tokens": {"truncation": "auto"},
    "/v1/messages": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    "/v1/messages/count_tokens": {"speed": "fast"},
    "/v1/embeddings": {"extra_body": {"x": 1}},
    "/api/chat": {"options": {"num_gpu": 1}},
    "/api/generate": {"shift": True},
    "/api/embed": {"options": {"num_thread": 1}},
    "/generate": {"data_parallel_rank": 0},
}


@pytest.fixture(scope="module")
def server():
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: "Some text."
    yield server
    server.client.close()


@pytest.fixture(scope="module")
def strict():
    server = ScriptedServer(strict_fields=True)
    server.scheduler.answer = lambda prompt, request: "Some text."
    yield server
    server.client.close()


def body_of(path, stream=None):
    body = BODIES.get(path) or UNSTREAMED[path]
    return body if stream is None else body | {"stream": stream}


def ask(server, path, body):
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return warnings_of_stream(answer.text)


@pytest.mark.parametrize(("path", "stream"), CASES)
def test_unknown_fields_are_listed_once(server, path, stream) -> None:
    body = body_of(path, stream)
    assert ask(server, path, body) == []
    assert ask(server, path, body | {"xyzzy": 1, "trace_id": {"a": [1]}, "nothing": None}) == [
        ["'xyzzy' has no effect: it is not known here", "'trace_id' has no effect: it is not known here"]
    ]


@pytest.mark.parametrize(("path", "stream"), [case for case in CASES if case[0] in ADVICE])
def test_advice_is_listed_once(server, path, stream) -> None:
    ((field, value),) = ADVICE[path].items()
    name = f"{field}.{next(iter(value))}" if field == "options" else field
    ((warning,),) = ask(server, path, body_of(path, stream) | {field: value})
    assert warning.startswith(f"'{name}' has no effect: ") and "not known" not in warning


@pytest.mark.parametrize("path", [*BODIES, *UNSTREAMED])
def test_strict_fields_refuse_them_by_name(strict, path) -> None:
    assert ask(strict, path, body_of(path)) == []
    for field, value in ({"xyzzy": 1} | ADVICE.get(path, {})).items():
        answer = strict.post(path, body_of(path) | {field: value})
        assert answer.status_code == 400 and field in answer.text, answer.text


@pytest.mark.parametrize("path", [*BODIES, *UNSTREAMED])
@pytest.mark.parametrize(
    "name",
    [
        *("respones_format", "guided_jsn", "guided_json", "stop_sequence", "maxTokens", "temprature", "grammar"),
        *("response_schema", "responseSchema", "json_mode", "stop_words", "thinking_budget", "template_file"),
        *("imageUrl", "file_ids", "adapter_id", "lora_name", "base_url"),
        *("chat_template", "chat_templates", "lora_path", "kv_transfer_params", "mcp_servers", "logits_processors"),
    ],
)
def test_what_has_a_meaning_elsewhere_or_resembles_it_is_refused(server, path, name) -> None:
    answer = server.post(path, body_of(path) | {name: "x"})
    assert answer.status_code == 400 and name in answer.text, answer.text


@pytest.mark.parametrize(
    "name",
    [
        *("thread_id", "session_id", "message_id", "request_id", "prompt_name", "user_agent", "tags", "trace"),
        *("provider_options", "response_modalities", "model_version", "app_id", "stream_id", "labels", "guard"),
    ],
)
def test_names_of_other_things_do_not_resemble_fields(server, name) -> None:
    for path in BODIES:
        assert len(ask(server, path, BODIES[path] | {"stream": False, name: "x"})) == 1


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "weight": 1}]}, "weight"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "x": 1}}, "x"),
        ("/v1/chat/completions", {"structured_outputs": {"regexp": "a"}}, "regexp"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "x"),
        ("/v1/chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort"),
        ("/v1/chat/completions", {"frequency_penality": 1}, "frequency_penality"),
        ("/v1/responses", {"frequency_penalty": 1}, "frequency_penalty"),
        ("/v1/responses", {"text": {"x": 1}}, "x"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}, "x": 1}]}, "x"),
        ("/api/chat", {"options": {"xyzzy": 1}}, "xyzzy"),
        ("/api/generate", {"temperature": 0}, "options.temperature"),
        ("/generate", {"sampling_params": {"xyzzy": 1}}, "xyzzy"),
    ],
)
def test_what_is_unknown_inside_is_refused(server, path, change, named) -> None:
    answer = server.post(path, BODIES[path] | change)
    assert answer.status_code == 400 and named in answer.text, answer.text


def test_names_are_cut_and_at_most_twenty_are_listed(server) -> None:
    names = {f"{'x' * 90}{number:03}": 1 for number in range(30)}
    (listed,) = ask(server, "/v1/completions", {"model": "default", "prompt": "hi", **names})
    assert len(listed) == 2 and all(len(text) < 150 for text in listed)  # cut, the names are the same
    names = {f"{number:03}{'x' * 90}": 1 for number in range(30)}
    (listed,) = ask(server, "/v1/completions", {"model": "default", "prompt": "hi", **names})
    assert len(listed) == 21 and listed[-1].endswith("it and 9 further fields are not known here")
    many = {f"x{number}": 1 for number in range(65)}
    assert server.post("/v1/completions", {"model": "default", "prompt": "hi", **many}).status_code == 400


def test_a_default_of_a_parameter_that_an_endpoint_lacks_asks_for_nothing(server) -> None:
    assert ask(server, "/v1/responses", BODIES["/v1/responses"] | {"frequency_penalty": 0, "logprobs": False}) == []


# -- what is sent by agents and libraries -----------------------------------------------------------

FUNCTION = {"name": "ls", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
CLAUDE_TOOL = {"name": "ls", "input_schema": FUNCTION["parameters"]}
CLAUDE = {"model": "default", "max_tokens": 60, "messages": [{"role": "user", "content": "list files"}]}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


@pytest.fixture(scope="module")
def without_reasoning():
    """A server whose model marks no reasoning."""
    server = ScriptedServer()
    server.scheduler.answer = lambda prompt, request: "Some text."
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{{ '<tool_call>' if tools }}"
    server.client.tokenizer.replace_chat_template(template)
    yield server
    server.client.close()


CODING_AGENT = CLAUDE | {
    "system": [
        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral", "scope": "global"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        *CLAUDE["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "b3BhcXVl"},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.py"}]},
    ],
    "tools": [CLAUDE_TOOL, WEB_SEARCH],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "user_1"},
}


@pytest.mark.parametrize("stream", [False, True, None])
def test_a_coding_agents_request_to_a_model_without_reasoning(without_reasoning, stream) -> None:
    body = CODING_AGENT | ({} if stream is None else {"stream": stream})
    path = "/v1/messages/count_tokens" if stream is None else "/v1/messages"
    if stream is None:
        body = {name: value for name, value in body.items() if name not in ("max_tokens", "metadata")}
    (warnings,) = ask(without_reasoning, path, body)
    assert [text.partition("' has no effect")[0] for text in warnings] == [
        "'context_management",
        "'tools[1]",
        "'redacted_thinking",
        "'thinking",
    ]


@pytest.mark.parametrize(
    "thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}]
)
def test_thinking_of_a_model_without_reasoning(without_reasoning, thinking) -> None:
    warnings = ask(without_reasoning, "/v1/messages", CLAUDE | {"thinking": thinking})
    expected = ["'thinking' has no effect: this model does not mark reasoning"]
    assert warnings == ([] if thinking["type"] == "disabled" else [expected])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"reasoning_effort": "high"}),
        ("/v1/chat/completions", CHAT | {"reasoning": {"effort": "high"}}),
        ("/v1/responses", {"model": "default", "input": "hi", "reasoning": {"effort": "high"}}),
        ("/api/chat", CHAT | {"think": True}),
        ("/api/generate", {"model": "default", "prompt": "hi", "think": "low"}),
    ],
)
def test_effort_is_advice_to_a_model_without_reasoning(without_reasoning, path, body) -> None:
    ((warning,),) = ask(without_reasoning, path, body)
    assert warning.endswith("has no effect: this model does not mark reasoning")


def test_tokens_of_a_body_for_messages_can_be_counted(server) -> None:
    body = CHAT | {"max_tokens": 9, "stream": True, "temperature": 0.5, "stop_sequences": ["x"]}
    (listed,) = ask(server, "/v1/messages/count_tokens", body)
    assert len(listed) == 4 and all("nothing is generated" in text for text in listed)


def test_the_refusal_of_threads_has_the_details_that_the_client_looks_for(server) -> None:
    for body in (CLAUDE | {"thread": {"type": "create"}}, CLAUDE | {"thread": {"type": "create"}, "stream": True}):
        answer = server.post("/v1/messages", body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error["type"] == "invalid_request_error" and "thread" in error["message"]


@pytest.mark.parametrize(
    ("path", "tools", "choice"),
    [
        ("/v1/messages", [WEB_SEARCH], None),
        ("/v1/messages", [CLAUDE_TOOL, WEB_SEARCH], {"type": "tool", "name": "web_search"}),
        ("/v1/messages", [CLAUDE_TOOL, {"type": "bash_20250124", "name": "bash"}], None),
        ("/v1/responses", [{"type": "web_search"}], None),
        ("/v1/responses", [{"type": "function", **FUNCTION}, {"type": "web_search"}], {"type": "web_search"}),
        ("/v1/responses", [{"type": "function", **FUNCTION}, {"type": "mcp", "server_url": "http://x/"}], None),
    ],
)
def test_hosted_tools_that_are_needed_are_refused(server, path, tools, choice) -> None:
    body = BODIES[path] | {"tools": tools} | ({} if choice is None else {"tool_choice": choice})
    answer = server.post(path, body)
    assert answer.status_code == 400 and ("tools[" in answer.text or "tool_choice" in answer.text), answer.text


@pytest.mark.parametrize("value", [[], {}, ""])
def test_an_empty_value_of_an_unknown_field_names_nothing(server, value) -> None:
    ((warning,),) = ask(server, "/v1/chat/completions", CHAT | {"files": value})
    assert warning == "'files' has no effect: it is not known here"
    assert server.post("/v1/chat/completions", CHAT | {"files": ["x"]}).status_code == 400


def test_hosted_tools_of_an_item_are_left_out_as_those_of_the_body(server) -> None:
    function, search = {"type": "function", **FUNCTION}, {"type": "web_search"}

    def request(tools: list, *of_item: dict, **fields):
        item = {"type": "additional_tools", "role": "developer", "tools": list(of_item)}
        ask = {"role": "user", "content": "hi"}
        return BODIES["/v1/responses"] | {"input": [item, ask], "tools": tools, "stream": False} | fields

    for body in (request([], search, function), request([function], search)):
        ((warning,),) = ask(server, "/v1/responses", body)
        assert warning == "'input[0].tools[0]' has no effect: web_search does not run here"
    ((*warnings,),) = ask(server, "/v1/responses", request([search, function], function | {"name": "other"}, search))
    assert [text.split("'")[1] for text in warnings] == ["tools[0]", "input[0].tools[1]"]
    for body in (request([], search), request([function], search, tool_choice={"type": "web_search"})):
        assert server.post("/v1/responses", body).status_code == 400


def test_long_lists_without_effect_are_listed_in_part(server) -> None:
    function = {"type": "function", **FUNCTION}
    body = BODIES["/v1/responses"] | {"tools": [function, *[{"type": "web_search"}] * 1000]}
    (listed,) = ask(server, "/v1/responses", body)
    assert len(listed) == MAX_WARNINGS + 1 and "not listed" in listed[-1]


CODEX = {
    "model": "default",
    "instructions": "You write code.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]}],
    "tools": [
        {"type": "function", **FUNCTION, "strict": False},
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "description": "more tools", "parameters": {"type": "object"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"installation": "x"},
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_agents_request(server, stream) -> None:
    (warnings,) = ask(server, "/v1/responses", CODEX | {"stream": stream})
    assert [text.partition("' has no effect")[0] for text in warnings] == [
        *("'reasoning.summary", "'reasoning.context", "'text.verbosity", "'client_metadata", "'tools[1]", "'tools[2]"),
        "'include: reasoning.encrypted_content",
    ]


def test_reasoning_items_of_another_server_are_left_out(server) -> None:
    items = [{"type": "reasoning", "summary": [], "encrypted_content": "b3BhcXVl"}, *CODEX["input"]]
    ((warning,),) = ask(server, "/v1/responses", BODIES["/v1/responses"] | {"input": items})
    assert warning == "'input[0].encrypted_content' has no effect: this server cannot read it"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"usage": {"include": True}, "user": "u", "safety_identifier": "u"}),
        ("/v1/completions", {"ignore_eos": True, "repetition_penalty": 1.0, "logprobs": None, "min_tokens": 1}),
        ("/generate", {"return_logprob": False, "lora_path": "", "return_routed_experts": False, "image_data": None}),
    ],
)
def test_what_benchmarks_send_has_no_warnings(server, path, body) -> None:
    assert ask(server, path, BODIES[path] | body) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"models": ["a", "b"]},
        {"provider": {"sort": "price"}},
        {"transforms": ["middle-out"]},
        {"metadata": {"trace_name": "x", "session_id": "y"}},
        {"caching": True},
        {"nvext": {"ignore_eos": True}},
        {"extra_body": {"x": 1}},
        {"prediction": {"type": "content", "content": "x"}},
        {"service_tier": "flex"},
    ],
)
def test_what_gateways_send_is_listed(server, fields) -> None:
    ((warning,),) = ask(server, "/v1/chat/completions", CHAT | fields)
    assert "has no effect" in warning and "not known" not in warning


PLACEMENT = {
    **{"num_keep": 5, "numa": False, "num_ctx": 64, "num_batch": 2, "num_gpu": 0, "main_gpu": 0},
    **{"use_mmap": True, "num_thread": 8, "typical_p": 0.7, "penalize_newline": True, "num_predict": 4},
    **{"mirostat": 0, "vocab_only": False, "low_vram": False, "repeat_last_n": 33, "repeat_penalty": 1.2},
}


def test_options_that_place_a_model(server) -> None:
    ((*warnings,),) = ask(server, "/api/generate", BODIES["/api/generate"] | {"options": PLACEMENT, "stream": False})
    assert [text.partition("' has no effect")[0] for text in warnings] == [
        f"'options.{name}" for name in ("num_keep", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread")
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("outputs", "same"),
    [
        ({"regex": "[0-9]{4}"}, {"regex": "[0-9]{4}"}),
        ({"choice": ["a", "b"]}, {"choices": ["a", "b"]}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        *(
            ({"json": schema}, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}})
            for schema in ({}, "{}")
        ),
    ],
)
def test_structured_outputs_of_vllm_are_constraints(server, path, outputs, same) -> None:
    constraints = []
    for fields in ({"structured_outputs": outputs}, same):
        server.scheduler.requests.clear()
        assert ask(server, path, BODIES[path] | fields) == []
        constraints.append(server.scheduler.sent(Generate)[0].constraint)
    assert constraints[0] == constraints[1] is not None
    both = server.post(path, BODIES[path] | {"structured_outputs": outputs, "regex": "a"})
    assert both.status_code == 400 and "structured_outputs" in both.text


def test_reasoning_that_is_sent_back_is_the_turns_reasoning(server) -> None:
    def prompt_of(**fields):
        turns = [*ASK, {"role": "assistant", "content": "ho", **fields}, *ASK]
        server.scheduler.requests.clear()
        assert ask(server, "/v1/chat/completions", {"model": "default", "messages": turns}) == []
        return [append.token_ids for append in server.scheduler.sent(Append)]

    template = (
        "{% for m in messages %}{{ m['role'] }}{{ m.get('reasoning_content', '') }}{{ m['content'] }}{% endfor %}"
        "{{ '<tool_call>' if tools }}"
    )
    old = server.client.tokenizer.chat_template.source
    server.client.tokenizer.replace_chat_template(template)
    try:
        assert prompt_of(reasoning="hm", reasoning_details=[]) == prompt_of(reasoning_content="hm") != prompt_of()
    finally:
        server.client.tokenizer.replace_chat_template(old)


def test_parsed_answers_of_openai_are_sent_back(server) -> None:
    call = {"name": "f", "arguments": "{}", "parsed_arguments": {"x": 1}}
    answer = {"role": "assistant", "content": "ho", "parsed": None}
    turns = [*ASK, answer | {"tool_calls": [{"id": "1", "type": "function", "function": call}]}]
    turns += [{"role": "tool", "tool_call_id": "1", "content": "done"}]
    assert ask(server, "/v1/chat/completions", {"model": "default", "messages": turns}) == []


def test_the_classes_are_counted(server) -> None:
    counts = server.app.state.plait.metrics.fields.values
    before = dict(counts)
    ask(server, "/v1/completions", {"model": "default", "prompt": "hi", "xyzzy": 1, "trace_id": 2, "store": True})
    assert {label: counts[label] - before.get(label, 0) for label in counts} == {("advice",): 1, ("unknown",): 2}


@pytest.mark.parametrize("endpoint", [*ENDPOINTS, *PARTS])
def test_a_field_has_one_row(endpoint) -> None:
    names = [
        name for row in (*ADVICE_ROWS, *REFUSED) if endpoint in row.endpoints.split() for name in row.names.split()
    ]
    assert len(names) == len(set(names))
