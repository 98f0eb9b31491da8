"""Large requests for `loop_gaps.py`, near the limits of the server: bodies, prompts, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_BODY = 8 << 20
SENTENCE = "The quick brown fox jumps over the lazy dog. "
CHAT_PATH, GENERATE, COMPLETIONS = "/v1/chat/completions", "/generate", "/v1/completions"
CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1,
    "temperature": 0,
}
COMPLETION = {"model": "default", "prompt": "hi", "max_tokens": 1, "temperature": 0}


class Case(NamedTuple):
    """A request. limit_s: it is cut off after this time; the work on some prompts takes minutes."""

    name: str
    path: str
    body: bytes
    limit_s: float = 4.0


def case(name: str, path: str, body: Any, limit_s: float = 4.0) -> Case:
    return Case(name, path, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode(), limit_s)


def request_cases() -> Iterator[Case]:
    yield case("a short chat", CHAT_PATH, CHAT)
    yield from json_cases()
    yield from prompt_cases()
    yield from message_cases()
    yield from tool_cases()


def filled(item: bytes, begin: bytes = b"[", end: bytes = b"]", limit: int = MAX_BODY) -> bytes:
    return begin + b",".join([item] * ((limit - 8) // (len(item) + 1))) + end


def json_cases() -> Iterator[Case]:
    """Bodies that are expensive to parse, whatever they mean."""
    for text in (b"[]", b"{}", b"1", b'""', b'{"a":1}'):
        yield case(f"8 MiB of {text.decode()}", CHAT_PATH, filled(text))
    yield case("8 MiB of escaped quotes", CHAT_PATH, b'{"a":"' + b'\\"' * ((MAX_BODY - 8) // 2) + b'"}')
    yield case("700,000 keys", CHAT_PATH, {str(i): 1 for i in range(700_000)})
    digits = MAX_BODY - 300
    for name, number in {
        "an integer": b"1" * digits,
        "a fraction": b"0." + b"1" * digits,
        "a small fraction": b"0." + b"0" * digits + b"1",
        "an exponent": b"1e" + b"0" * digits + b"1",
    }.items():
        yield case(f"{name} of 8 MB", CHAT_PATH, b'{"temperature":' + number + b"}")
        yield case(f"{name} of 8 MB in a schema", CHAT_PATH, number.join(_around_value()))
    yield case("350,000 integers beyond 64 bits", CHAT_PATH, b'{"a":' + filled(b"9" * 20) + b"}")
    for number in ("1e300", "1.234567890123e-300", "9007199254740993.0", "1e23"):  # that lie near half of a last bit
        yield case(f"8 MiB of {number}", CHAT_PATH, b'{"a":' + filled(number.encode()) + b"}")
        few = filled(number.encode(), limit=1999 * (len(number) + 1))
        yield case(f"2,000 of {number}", CHAT_PATH, b'{"a":' + few + b"}")
    yield case(
        "500,000 texts that are not ASCII", CHAT_PATH, _wrapped(filled('"é漢漢漢"'.encode(), limit=14 * 499_000))
    )
    yield case("500,000 texts with an escape", CHAT_PATH, _wrapped(filled(rb'"\u00e9aaaaa"', limit=14 * 499_000)))
    keys = b",".join(f'"é{i:06d}":"é{i:06d}"'.encode() for i in range(99_000))
    yield case("100,000 keys and values that are not ASCII", CHAT_PATH, b'{"metadata":{' + keys + b"}}")
    for name, end in {
        "digits": b"1" * digits,
        "backslashes": b'"' + b"\\" * digits,
        "escapes": b'"' + rb"\u00e9" * (digits // 6),
        "spaces": b" " * digits,
    }.items():
        yield case(f"8 MB of {name}, cut off", CHAT_PATH, b'{"a":' + end)
    yield case("a key of 8 MB", CHAT_PATH, b'{"' + b"k" * digits + b'":1}')
    yield case("a nested key of 8 MB", CHAT_PATH, b'{"stream_options":{"' + b"`k" * (digits // 2) + b'":1}}')
    yield case("a model name of 8 MB", CHAT_PATH, CHAT | {"model": "m" * digits})
    yield case("a user of 8 MB", CHAT_PATH, CHAT | {"user": "\u00e9" * (digits // 6)})
    yield case(
        "100 arrays in each other, with 400,000 numbers",
        CHAT_PATH,
        b"[" * 100 + filled(b"12", b"", b"", 1_200_000) + b"]" * 100,
    )


def _around_value() -> tuple[bytes, bytes]:
    """The JSON before and after a value in a schema, which any value may be."""
    before, after = json.dumps(with_schema({"const": "HERE"})).split('"HERE"')
    return before.encode(), after.encode()


def _wrapped(array: bytes) -> bytes:
    return b'{"model":"default","messages":[{"role":"user","content":"a"}],"choices":' + array + b"}"


def prompt_cases() -> Iterator[Case]:
    for count, repeats in ((128, 422), (128, 40), (1, 23_000)):
        texts = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        body = {"text": texts, "sampling_params": {"max_new_tokens": 1}}
        yield case(f"{count} prompts of {len(texts[-1]):,} characters", GENERATE, body)
    yield case("128 completions of 500 characters", COMPLETIONS, COMPLETION | {"prompt": [SENTENCE * 11] * 128})
    ids = [[1000 + i % 1000 for i in range(8000)]] * 100
    yield case("100 prompts of 8,000 ids", GENERATE, {"input_ids": ids})
    yield case("60 prompts of 8,000 ids", GENERATE, {"input_ids": ids[:60]})
    yield case("60 completions of 8,000 ids", COMPLETIONS, COMPLETION | {"prompt": ids[:60]})
    yield case("a completion of 400,000 ids", COMPLETIONS, COMPLETION | {"prompt": [1] * 400_000})
    yield case("a prompt of 400,000 ids", GENERATE, {"input_ids": [1] * 400_000})
    yield case("400,000 ids to detokenize", "/detokenize", {"tokens": [1000] * 400_000})
    yield case("128 lists of ids to detokenize", "/detokenize", {"tokens": [[1000] * 3000] * 128})
    for count, repeats in ((2048, 1), (100, 300)):
        inputs = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        name = f"{count:,} texts of {len(inputs[-1]):,} characters to embed"
        yield case(name, "/v1/embeddings", {"model": "default", "input": inputs})
    for size in (1 << 20, MAX_BODY - (1 << 12)):
        text = (SENTENCE * (size // len(SENTENCE)))[:size]
        yield case(f"{size >> 20} MiB to tokenize", "/tokenize", {"prompt": text})
    texts = {"prompt": [SENTENCE * 80] * 1000, "return_token_strs": True}
    yield case("1,000 texts to tokenize, with names", "/tokenize", texts)
    yield case("8 MB of <", GENERATE, {"text": "<" * (MAX_BODY - 100)})
    yield case("an Ollama prompt of 8 MB", "/api/generate", {"model": "default", "prompt": "a" * (MAX_BODY - 100)})
    yield case(
        "a raw Ollama prompt of 8 MB",
        "/api/generate",
        {"model": "default", "prompt": "<" * (MAX_BODY - 100), "raw": True},
    )


def message_cases() -> Iterator[Case]:
    """Long conversations, in the shapes of all protocols."""
    user = {"role": "user", "content": "hi"}
    yield case("a message of 1 MB", CHAT_PATH, CHAT | {"messages": [user | {"content": SENTENCE * 23_000}]})
    yield case("1024 messages", CHAT_PATH, CHAT | {"messages": CHAT["messages"] * 1024})
    yield case("1024 messages of 7 KB", CHAT_PATH, CHAT | {"messages": [user | {"content": SENTENCE * 160}] * 1024})
    part = {"type": "text", "text": SENTENCE}
    yield case("19,000 content parts", CHAT_PATH, CHAT | {"messages": [user | {"content": [part] * 19_000}]})
    yield case("19,000 Anthropic blocks", "/v1/messages", anthropic([user | {"content": [part] * 19_000}]))
    yield case(
        "19,000 Anthropic blocks to count",
        "/v1/messages/count_tokens",
        {"model": "default", "messages": [user | {"content": [part] * 19_000}]},
    )
    yield case("19,000 Anthropic system blocks", "/v1/messages", anthropic([user]) | {"system": [part] * 19_000})
    yield case(
        "1024 Anthropic messages of one role", "/v1/messages", anthropic([user | {"content": SENTENCE * 160}] * 1024)
    )
    yield case("1024 input items", "/v1/responses", responses([{"role": "user", "content": SENTENCE * 160}] * 1024))
    yield case(
        "7 MB of reasoning",
        CHAT_PATH,
        CHAT
        | {"messages": [user, {"role": "assistant", "content": "a", "reasoning_content": SENTENCE * 160_000}, user]},
    )
    yield case("names of 7 MB", CHAT_PATH, CHAT | {"messages": [user | {"name": SENTENCE * 160_000}]})
    yield case("7 MB of instructions", "/v1/responses", responses("hi") | {"instructions": SENTENCE * 160_000})
    yield case("metadata of 7 MB", "/v1/responses", responses("hi") | {"metadata": {"a": SENTENCE * 160_000}})
    yield case("a template variable of 7 MB", CHAT_PATH, CHAT | {"chat_template_kwargs": {"a": SENTENCE * 160_000}})
    yield case(
        "template variables of 99,000 keys",
        CHAT_PATH,
        CHAT | {"chat_template_kwargs": {"a": {str(i): i for i in range(99_000)}}},
    )
    yield case(
        "annotations of 400,000 numbers",
        CHAT_PATH,
        CHAT | {"messages": [{"role": "assistant", "content": "a", "annotations": [1] * 400_000}, user]},
    )


def anthropic(messages: list[Any]) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 1, "messages": messages}


def responses(value: Any) -> dict[str, Any]:
    return {"model": "default", "max_output_tokens": 1, "input": value}


def tool_cases() -> Iterator[Case]:
    """Tools, and calls of tools in the history."""
    for count, properties in ((128, 0), (128, 20), (128, 100)):
        body = CHAT | {"tools": tools(count, properties)}
        yield case(f"{count} tools of {properties} properties", CHAT_PATH, body)
        yield case(f"{count} tools of {properties} properties, required", CHAT_PATH, body | {"tool_choice": "required"})
    for name, text in {
        "a text": json.dumps({"a": SENTENCE * 160_000}),
        "control characters": json.dumps({"a": "<" * 7_000_000}),
        "numbers": json.dumps({"a": [1] * 2_300_000}),
        "objects": json.dumps({"a": [{"b": 1}] * 600_000}),
        "texts": '{"a": [' + ",".join(['"é漢"'] * 550_000) + "]}",
        "a number": '{"a": 0.' + "1" * 7_000_000 + "}",
        "no JSON": "{" + SENTENCE * 160_000,
    }.items():
        yield case(f"7 MB of tool arguments, {name}", CHAT_PATH, CHAT | {"messages": called(text)})
        items = [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": text},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ]
        yield case(f"7 MB of tool arguments of a response, {name}", "/v1/responses", responses(items))
    for name, value in {
        "a text": {"a": SENTENCE * 160_000},
        "400,000 numbers": {"a": [1] * 400_000},
        "19,000 objects": {"a": [{"b": 1}] * 19_000},
    }.items():
        use = {"type": "tool_use", "id": "c", "name": "f", "input": value}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}
        messages = [CHAT["messages"][0], {"role": "assistant", "content": [use]}, result]
        yield case(f"a tool use of Anthropic, {name}", "/v1/messages", anthropic(messages))
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
        yield case(
            f"a tool call of Ollama, {name}",
            "/api/chat",
            {"model": "default", "messages": [*CHAT["messages"], call, {"role": "tool", "content": "1"}]},
        )
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(9000)]
    many = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": calls}]
    yield case("9,000 tool calls", CHAT_PATH, CHAT | {"messages": many})
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "1"} for i in range(1000)]
    yield case("9,000 tool calls with 1,000 results", CHAT_PATH, CHAT | {"messages": many + results})
    items = [
        item
        for i in range(512)
        for item in (
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": "1"},
        )
    ]
    yield case("512 calls and results of a response", "/v1/responses", responses(items))
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "tool_127"}}] * 9000},
    }
    yield case("9,000 names of allowed tools", CHAT_PATH, CHAT | {"tools": tools(128, 0), "tool_choice": allowed})
    described = [{"type": "function", "function": {"name": "f", "description": "<" * 7_000_000}}]
    yield case("a tool with a description of 7 MB", CHAT_PATH, CHAT | {"tools": described})
    enum = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"enum": list(range(400_000))}}},
            },
        }
    ]
    yield case("a tool with 400,000 values", CHAT_PATH, CHAT | {"tools": enum})


def called(arguments: str) -> list[Any]:
    """A conversation in which the model called a tool with `arguments`."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]


def nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def wide_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(count)}}


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tools(count: int, properties: int) -> list[dict[str, Any]]:
    function = {"description": SENTENCE, "parameters": wide_schema(properties)}
    return [{"type": "function", "function": {"name": f"tool_{i}", **function}} for i in range(count)]
