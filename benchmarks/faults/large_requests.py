"""Large requests for the group `event_loop`, near the limits of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

MAX_BODY = 8 << 20
SENTENCE = "The quick brown fox jumps over the lazy dog. "
TEXT = SENTENCE * 160_000  # 7 MB
CHAT_PATH, GENERATE, COMPLETIONS = "/v1/chat/completions", "/generate", "/v1/completions"
ANTHROPIC, RESPONSES, PROGRAMS = "/v1/messages", "/v1/responses", "/v1/programs"
MODEL = {"model": "default"}
USER = {"role": "user", "content": "hi"}
ANSWER = MODEL | {"max_tokens": 1}
CHAT: dict[str, Any] = ANSWER | {"messages": [USER], "temperature": 0}
COMPLETION = ANSWER | {"prompt": "hi", "temperature": 0}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GEN = {"gen": {"max_tokens": 1}}
SLOW = {  # those whose answers take longer than others, and the seconds after which they are cut off
    "16 echoes of 3,000 tokens with logprobs as a stream": 60.0,
    "128 answers of 100 tokens with 20 logprobs": 60.0,
}
Kinds = Iterator[tuple[str, str, Any]]  # a name, a path, and a body


def kinds() -> Iterator[tuple[str, str, bytes]]:
    """Yields the name, the path and the body of each kind of request."""
    yield "a short chat", CHAT_PATH, json.dumps(CHAT).encode()
    for name, path, body in chain(documents(), prompts(), messages(), tools(), constraints(), others()):
        yield name, path, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()


def filled(item: bytes) -> bytes:
    return b"[" + b",".join([item] * ((MAX_BODY - 8) // (len(item) + 1))) + b"]"


def documents() -> Kinds:
    """Bodies that are expensive to parse, whatever they mean."""
    digits = MAX_BODY - 300
    bodies: dict[str, Any] = {f"8 MiB of {text}": filled(text.encode()) for text in ("[]", "1", '""', '{"a":1}')}
    bodies["8 MiB of escaped quotes"] = b'{"a":"' + b'\\"' * ((MAX_BODY - 8) // 2) + b'"}'
    bodies["600,000 keys"] = {str(i): 1 for i in range(600_000)}
    before, after = json.dumps(with_schema({"const": "HERE"})).split('"HERE"')
    for name, number in {"an integer": b"1" * digits, "a small fraction": b"0." + b"0" * digits + b"1"}.items():
        bodies[f"{name} of 8 MB"] = b'{"temperature":' + number + b"}"
        bodies[f"{name} of 8 MB in a schema"] = before.encode() + number + after.encode()
    for number in (b"9" * 20, b"1.234567890123e-300", b"9007199254740993.0"):  # the last lies at half of a last bit
        bodies[f"8 MiB of {number.decode()}"] = b'{"a":' + filled(number) + b"}"
    keys = b",".join(f'"é{i:06d}":"é{i:06d}"'.encode() for i in range(99_000))
    bodies["100,000 keys and values that are not ASCII"] = b'{"metadata":{' + keys + b"}}"
    for name, start, unit in (("digits", b"", b"1"), ("backslashes", b'"', b"\\"), ("escapes", b'"', rb"\u00e9")):
        bodies[f"8 MB of {name}, cut off"] = b'{"a":' + start + unit * (digits // len(unit))
    bodies["a nested key of 8 MB"] = b'{"stream_options":{"' + b"`k" * (digits // 2) + b'":1}}'
    bodies["a model name of 8 MB"] = CHAT | {"model": "m" * digits}
    yield from ((name, CHAT_PATH, body) for name, body in bodies.items())


def prompts() -> Kinds:
    for count, repeats in ((128, 422), (1, 23_000)):
        texts = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        yield f"{count} prompts of {len(texts[-1]):,} characters", GENERATE, sglang(text=texts)
    ids = [[1000 + i % 1000 for i in range(8000)]] * 100
    yield "100 prompts of 8,000 ids", GENERATE, {"input_ids": ids}
    yield "60 completions of 8,000 ids", COMPLETIONS, COMPLETION | {"prompt": ids[:60]}
    yield "a prompt of 400,000 ids", GENERATE, {"input_ids": [1] * 400_000}
    yield "400,000 ids to detokenize", "/detokenize", {"tokens": [1000] * 400_000}
    texts = [f"{i} {SENTENCE}" for i in range(2048)]
    yield "2,048 texts to embed", "/v1/embeddings", MODEL | {"input": texts}
    yield "8 MB to tokenize", "/tokenize", {"prompt": TEXT}
    yield "1,000 texts to tokenize", "/tokenize", {"prompt": [SENTENCE * 80] * 1000, "return_token_strs": True}
    yield "8 MB of <", GENERATE, {"text": "<" * (MAX_BODY - 100)}
    yield "an Ollama prompt of 8 MB", "/api/generate", MODEL | {"prompt": "a" * (MAX_BODY - 100)}


def messages() -> Kinds:
    """Long conversations, in the shapes of all protocols."""
    part, long = {"type": "text", "text": SENTENCE}, USER | {"content": SENTENCE * 160}
    parts, many = [USER | {"content": [part] * 19_000}], [long] * 1024
    reasoning = [USER, {"role": "assistant", "content": "a", "reasoning_content": TEXT}, USER]
    yield "a message of 1 MB", CHAT_PATH, CHAT | {"messages": [USER | {"content": SENTENCE * 23_000}]}
    yield "1024 messages of 7 KB", CHAT_PATH, CHAT | {"messages": many}
    yield "19,000 content parts", CHAT_PATH, CHAT | {"messages": parts}
    yield "7 MB of reasoning", CHAT_PATH, CHAT | {"messages": reasoning}
    yield "names of 7 MB", CHAT_PATH, CHAT | {"messages": [USER | {"name": TEXT}]}
    yield "a template variable of 7 MB", CHAT_PATH, CHAT | {"chat_template_kwargs": {"a": TEXT}}
    yield "19,000 Anthropic blocks", ANTHROPIC, ANSWER | {"messages": parts}
    yield "1024 Anthropic messages of one role", ANTHROPIC, ANSWER | {"messages": many}
    yield "1024 input items", RESPONSES, MODEL | {"input": many}
    yield "metadata of 7 MB", RESPONSES, MODEL | {"input": "hi", "metadata": {"a": TEXT}}


def tools() -> Kinds:
    for properties in (0, 100):
        body = CHAT | {"tools": many_tools(properties)}
        yield f"128 tools of {properties} properties", CHAT_PATH, body
        yield f"128 tools of {properties} properties, required", CHAT_PATH, body | {"tool_choice": "required"}
    function = {"name": "f", "description": "<" * 7_000_000}
    yield "a tool's description of 7 MB", CHAT_PATH, CHAT | {"tools": [{"type": "function", "function": function}]}
    for name, value in {"a text": TEXT, "numbers": [1] * 2_300_000, "objects": [{"b": 1}] * 600_000}.items():
        call = CALL | {"function": {"name": "f", "arguments": json.dumps({"a": value})}}
        yield f"7 MB of tool arguments, {name}", CHAT_PATH, CHAT | {"messages": called([call], ["c"])}
    use = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1] * 400_000}}],
    }
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}
    yield "a tool use of Anthropic", ANTHROPIC, ANSWER | {"messages": [USER, use, result]}
    yield "9,000 tool calls", CHAT_PATH, CHAT | {"messages": called([CALL | {"id": f"c{i}"} for i in range(9000)], [])}


def constraints() -> Kinds:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(115):  # with the rest of the body near the limit of 128 levels
        deep = {"items": deep}
    for name, schema in {
        "115 levels": deep,
        "20,000 properties": wide_schema(20_000),
        "400,000 values": {"enum": list(range(400_000))},
        "a text of 7 MB": {"const": TEXT},
        "a pattern of 7 MB": {"type": "string", "pattern": "a" * 7_000_000},
        "300,000 required names": {"type": "object", "required": [f"a{i}" for i in range(300_000)]},
        "an unknown keyword of 7 MB": {"k" * 7_000_000: 1},
        "19,000 references": {"anyOf": [{"$ref": "#/$defs/a"}] * 19_000, "$defs": {"a": {"type": "string"}}},
    }.items():
        yield f"a schema with {name}", CHAT_PATH, with_schema(schema)
    yield "SGLang's schema of 1,000,000 arrays", GENERATE, sglang(json_schema=json.dumps([[1]] * 1_000_000))
    for name in ("regex", "ebnf", "lark", "stop_regex"):
        yield f"a {name} of 8 MB", CHAT_PATH, CHAT | {name: "(a|" * (MAX_BODY // 3 - 100)}
    yield "90,000 choices", CHAT_PATH, CHAT | {"choices": [f"choice {i}" for i in range(90_000)]}


def others() -> Kinds:
    """Sampling parameters, long answers, and programs near the limits of nodes, of branches and of text."""
    for name, value in {
        "logit_bias": {str(i): 1 for i in range(500_000)},
        "stop": ["ab"] * 90_000,
        "stop_token_ids": [1] * 400_000,
    }.items():
        yield f"a large {name}", CHAT_PATH, CHAT | {name: value}
    for name, fields in {
        "60 stop strings": {"stop": ["a" * 1000] * 60},
        "700 logit_bias": {"logit_bias": {str(i): 1 for i in range(700)}},
        "a schema": {"json_schema": json.dumps(wide_schema(300))},
    }.items():
        body = {"text": ["hi"] * 128, "sampling_params": [{"max_new_tokens": 1} | fields] * 128}
        yield f"128 prompts with {name} each", GENERATE, body
    echoes, listed = SLOW
    fields = {"prompt": SENTENCE * 300, "echo": True, "logprobs": 20, "stream": True, "n": 16}
    yield echoes, COMPLETIONS, COMPLETION | fields
    fields = {"max_tokens": 100, "n": 128, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    yield listed, CHAT_PATH, CHAT | fields
    for name, nodes in {
        "4,000 texts": [{"text": "a"}] * 4000 + [GEN],
        "126 branches": [{"fork": {"branches": [[{"text": f"{i} {SENTENCE}"}, GEN] for i in range(126)]}}],
        "1,000 turns": [{"role": "user", "content": [{"text": SENTENCE}]}] * 1000 + [GEN],
        "7 texts of 1 MB": [{"text": "<" * 1_000_000}] * 7,
        "1,000 choices": [{"select": {"choices": [f"{i} choice" for i in range(1000)]}}],
    }.items():
        yield f"a program of {name}", PROGRAMS, {"program": nodes}
    variables = {"program": [{"var": "a"}] * 4000 + [GEN], "variables": {"a": "x" * 1_000_000}}
    yield "a program of 4,000 variables", PROGRAMS, variables


def sglang(text: Any = "hi", **sampling: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 1} | sampling}


def called(calls: list[Any], answered: list[str]) -> list[Any]:
    """A conversation in which the model called tools, some of which answered."""
    results = [{"role": "tool", "tool_call_id": number, "content": "1"} for number in answered]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def wide_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(count)}}


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def many_tools(properties: int) -> list[dict[str, Any]]:
    function = {"description": SENTENCE, "parameters": wide_schema(properties)}
    return [{"type": "function", "function": {"name": f"tool_{i}", **function}} for i in range(128)]
