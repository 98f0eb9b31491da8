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
CHAT: dict[str, Any] = MODEL | {"messages": [USER], "max_tokens": 1, "temperature": 0}
COMPLETION = MODEL | {"prompt": "hi", "max_tokens": 1, "temperature": 0}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GEN = {"gen": {"max_tokens": 1}}
LIMIT_S = {  # answers after which a request is cut off, of those that take longer than others
    "16 echoes of 3,000 tokens with logprobs as a stream": 60.0,
    "128 answers of 100 tokens with 20 logprobs": 60.0,
}
Kinds = Iterator[tuple[str, str, Any]]  # a name, a path, and a body


def kinds() -> Iterator[tuple[str, str, bytes]]:
    """Yields the name, the path and the body of each kind of request."""
    yield "a short chat", CHAT_PATH, json.dumps(CHAT).encode()
    parts = (documents(), prompts(), messages(), tools(), tool_arguments(), constraints(), sampling(), answers())
    for name, path, body in chain(*parts, programs()):
        yield name, path, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()


def filled(item: bytes, limit: int = MAX_BODY) -> bytes:
    return b"[" + b",".join([item] * ((limit - 8) // (len(item) + 1))) + b"]"


def documents() -> Kinds:
    """Bodies that are expensive to parse, whatever they mean."""
    digits = MAX_BODY - 300
    bodies: dict[str, Any] = {f"8 MiB of {text}": filled(text.encode()) for text in ("[]", "{}", "1", '""', '{"a":1}')}
    bodies["8 MiB of escaped quotes"] = b'{"a":"' + b'\\"' * ((MAX_BODY - 8) // 2) + b'"}'
    bodies["700,000 keys"] = {str(i): 1 for i in range(700_000)}
    before, after = json.dumps(with_schema({"const": "HERE"})).split('"HERE"')
    for name, number in {
        "an integer": b"1" * digits,
        "a fraction": b"0." + b"1" * digits,
        "a small fraction": b"0." + b"0" * digits + b"1",
        "an exponent": b"1e" + b"0" * digits + b"1",
    }.items():
        bodies[f"{name} of 8 MB"] = b'{"temperature":' + number + b"}"
        bodies[f"{name} of 8 MB in a schema"] = before.encode() + number + after.encode()
    bodies["350,000 integers beyond 64 bits"] = b'{"a":' + filled(b"9" * 20) + b"}"
    for number in ("1e300", "1.234567890123e-300", "9007199254740993.0", "1e23"):  # that lie near half of a last bit
        bodies[f"8 MiB of {number}"] = b'{"a":' + filled(number.encode()) + b"}"
        bodies[f"2,000 of {number}"] = b'{"a":' + filled(number.encode(), 1999 * (len(number) + 1)) + b"}"
    begin = b'{"model":"default","messages":[{"role":"user","content":"a"}],"choices":'
    bodies["500,000 texts that are not ASCII"] = begin + filled('"é漢漢漢"'.encode(), 14 * 499_000) + b"}"
    bodies["500,000 texts with an escape"] = begin + filled(rb'"\u00e9aaaaa"', 14 * 499_000) + b"}"
    keys = b",".join(f'"é{i:06d}":"é{i:06d}"'.encode() for i in range(99_000))
    bodies["100,000 keys and values that are not ASCII"] = b'{"metadata":{' + keys + b"}}"
    bodies["8 MB of digits, cut off"] = b'{"a":' + b"1" * digits
    bodies["8 MB of backslashes, cut off"] = b'{"a":"' + b"\\" * digits
    bodies["8 MB of escapes, cut off"] = b'{"a":"' + rb"\u00e9" * (digits // 6)
    bodies["8 MB of spaces, cut off"] = b'{"a":' + b" " * digits
    bodies["a key of 8 MB"] = b'{"' + b"k" * digits + b'":1}'
    bodies["a nested key of 8 MB"] = b'{"stream_options":{"' + b"`k" * (digits // 2) + b'":1}}'
    bodies["a model name of 8 MB"] = CHAT | {"model": "m" * digits}
    bodies["a user of 8 MB"] = CHAT | {"user": "\u00e9" * (digits // 6)}
    deep = b"[" * 100 + filled(b"12", 1_200_000) + b"]" * 100
    bodies["100 arrays in each other, with 400,000 numbers"] = deep
    yield from ((name, CHAT_PATH, body) for name, body in bodies.items())


def prompts() -> Kinds:
    for count, repeats in ((128, 422), (128, 40), (1, 23_000)):
        texts = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        yield f"{count} prompts of {len(texts[-1]):,} characters", GENERATE, sglang(text=texts)
    yield "128 completions of 500 characters", COMPLETIONS, COMPLETION | {"prompt": [SENTENCE * 11] * 128}
    ids = [[1000 + i % 1000 for i in range(8000)]] * 100
    yield "100 prompts of 8,000 ids", GENERATE, {"input_ids": ids}
    yield "60 prompts of 8,000 ids", GENERATE, {"input_ids": ids[:60]}
    yield "60 completions of 8,000 ids", COMPLETIONS, COMPLETION | {"prompt": ids[:60]}
    yield "a completion of 400,000 ids", COMPLETIONS, COMPLETION | {"prompt": [1] * 400_000}
    yield "a prompt of 400,000 ids", GENERATE, {"input_ids": [1] * 400_000}
    yield "400,000 ids to detokenize", "/detokenize", {"tokens": [1000] * 400_000}
    yield "128 lists of ids to detokenize", "/detokenize", {"tokens": [[1000] * 3000] * 128}
    for count, repeats in ((2048, 1), (100, 300)):
        texts = [f"{i} {SENTENCE * repeats}" for i in range(count)]
        yield f"{count:,} texts of {len(texts[-1]):,} characters to embed", "/v1/embeddings", MODEL | {"input": texts}
    for size in (1 << 20, MAX_BODY - (1 << 12)):
        text = (SENTENCE * (size // len(SENTENCE)))[:size]
        yield f"{size >> 20} MiB to tokenize", "/tokenize", {"prompt": text}
    named = {"prompt": [SENTENCE * 80] * 1000, "return_token_strs": True}
    yield "1,000 texts to tokenize, with names", "/tokenize", named
    marks = "<" * (MAX_BODY - 100)
    yield "8 MB of <", GENERATE, {"text": marks}
    yield "an Ollama prompt of 8 MB", "/api/generate", MODEL | {"prompt": "a" * (MAX_BODY - 100)}
    yield "a raw Ollama prompt of 8 MB", "/api/generate", MODEL | {"prompt": marks, "raw": True}


def messages() -> Kinds:
    """Long conversations, in the shapes of all protocols."""
    part, long = {"type": "text", "text": SENTENCE}, USER | {"content": SENTENCE * 160}
    parts = [USER | {"content": [part] * 19_000}]
    for name, conversation in {
        "a message of 1 MB": [USER | {"content": SENTENCE * 23_000}],
        "1024 messages": [USER] * 1024,
        "1024 messages of 7 KB": [long] * 1024,
        "19,000 content parts": parts,
        "7 MB of reasoning": [USER, {"role": "assistant", "content": "a", "reasoning_content": TEXT}, USER],
        "names of 7 MB": [USER | {"name": TEXT}],
        "annotations of 400,000 numbers": [
            {"role": "assistant", "content": "a", "annotations": [1] * 400_000},
            USER,
        ],
    }.items():
        yield name, CHAT_PATH, CHAT | {"messages": conversation}
    yield "19,000 Anthropic blocks", ANTHROPIC, anthropic(parts)
    yield "19,000 Anthropic blocks to count", f"{ANTHROPIC}/count_tokens", MODEL | {"messages": parts}
    yield "19,000 Anthropic system blocks", ANTHROPIC, anthropic([USER]) | {"system": [part] * 19_000}
    yield "1024 Anthropic messages of one role", ANTHROPIC, anthropic([long] * 1024)
    yield "1024 input items", RESPONSES, response([long] * 1024)
    yield "7 MB of instructions", RESPONSES, response("hi") | {"instructions": TEXT}
    yield "metadata of 7 MB", RESPONSES, response("hi") | {"metadata": {"a": TEXT}}
    for name, value in {
        "variable of 7 MB": TEXT,
        "variables of 99,000 keys": {str(i): i for i in range(99_000)},
    }.items():
        yield f"template {name}", CHAT_PATH, CHAT | {"chat_template_kwargs": {"a": value}}


def tools() -> Kinds:
    for properties in (0, 20, 100):
        body = CHAT | {"tools": many_tools(properties)}
        yield f"128 tools of {properties} properties", CHAT_PATH, body
        yield f"128 tools of {properties} properties, required", CHAT_PATH, body | {"tool_choice": "required"}
    named = [{"type": "function", "function": {"name": "tool_127"}}] * 9000
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    yield "9,000 names of allowed tools", CHAT_PATH, CHAT | {"tools": many_tools(0), "tool_choice": choice}
    values = {"type": "object", "properties": {"a": {"enum": list(range(400_000))}}}
    for name, fields in {
        "a description of 7 MB": {"description": "<" * 7_000_000},
        "400,000 values": {"parameters": values},
    }.items():
        yield (
            f"a tool with {name}",
            CHAT_PATH,
            CHAT | {"tools": [{"type": "function", "function": {"name": "f"} | fields}]},
        )


def tool_arguments() -> Kinds:
    """Calls of tools in the history."""
    for name, text in {
        "a text": json.dumps({"a": TEXT}),
        "control characters": json.dumps({"a": "<" * 7_000_000}),
        "numbers": json.dumps({"a": [1] * 2_300_000}),
        "objects": json.dumps({"a": [{"b": 1}] * 600_000}),
        "texts": '{"a": [' + ",".join(['"é漢"'] * 550_000) + "]}",
        "a number": '{"a": 0.' + "1" * 7_000_000 + "}",
        "no JSON": "{" + TEXT,
    }.items():
        call = CALL | {"function": {"name": "f", "arguments": text}}
        yield f"7 MB of tool arguments, {name}", CHAT_PATH, CHAT | {"messages": called([call], ["c"])}
        yield f"7 MB of tool arguments of a response, {name}", RESPONSES, response(call_items("c", text))
    for name, value in {
        "a text": {"a": TEXT},
        "400,000 numbers": {"a": [1] * 400_000},
        "19,000 objects": {"a": [{"b": 1}] * 19_000},
    }.items():
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": value}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}
        yield f"a tool use of Anthropic, {name}", ANTHROPIC, anthropic([USER, use, result])
        turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
        history = [USER, turn, {"role": "tool", "content": "1"}]
        yield f"a tool call of Ollama, {name}", "/api/chat", MODEL | {"messages": history}
    calls = [CALL | {"id": f"c{i}"} for i in range(9000)]
    yield "9,000 tool calls", CHAT_PATH, CHAT | {"messages": called(calls, [])}
    answered = called(calls, [f"c{i}" for i in range(1000)])
    yield "9,000 tool calls with 1,000 results", CHAT_PATH, CHAT | {"messages": answered}
    items = [item for i in range(512) for item in call_items(f"c{i}", "{}")]
    yield "512 calls and results of a response", RESPONSES, response(items)


def constraints() -> Kinds:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(115):  # with the rest of the body near the limit of 128 levels
        deep = {"items": deep}
    yield "a schema of 115 levels", CHAT_PATH, with_schema(deep)
    for levels in (30, 60):
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        yield f"a schema of {levels} levels", CHAT_PATH, with_schema(schema)
    for count in (5000, 20_000):
        yield f"a schema of {count:,} properties", CHAT_PATH, with_schema(wide_schema(count))
    for name, schema in {
        "400,000 values": {"enum": list(range(400_000))},
        "400,000 texts": {"enum": [f"{i}" for i in range(400_000)]},
        "a text of 7 MB": {"const": TEXT},
        "a description of 7 MB": {"type": "string", "description": TEXT},
        "a pattern of 7 MB": {"type": "string", "pattern": "a" * 7_000_000},
        "300,000 required names": {"type": "object", "required": [f"a{i}" for i in range(300_000)]},
        "an unknown keyword of 7 MB": {"k" * 7_000_000: 1},
        "19,000 references": {"anyOf": [{"$ref": "#/$defs/a"}] * 19_000, "$defs": {"a": {"type": "string"}}},
    }.items():
        yield f"a schema with {name}", CHAT_PATH, with_schema(schema)
        yield f"SGLang's schema with {name}", GENERATE, sglang(json_schema=json.dumps(schema))
    yield "SGLang's schema of 1,000,000 arrays", GENERATE, sglang(json_schema=json.dumps([[1]] * 1_000_000))
    tag = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {"const": "a" * 7_000_000}, "end": ""}]}
    yield "a structural tag of 7 MB", GENERATE, sglang(structural_tag=json.dumps(tag | {"triggers": ["<a>"]}))
    for name in ("regex", "ebnf", "lark"):
        yield f"a {name} of 8 MB", CHAT_PATH, CHAT | {name: "(a|" * (MAX_BODY // 3 - 100)}
    for count in (10_000, 90_000):
        yield f"{count:,} choices", CHAT_PATH, CHAT | {"choices": [f"choice {i}" for i in range(count)]}


def sampling() -> Kinds:
    for count in (1024, 19_000, 500_000):
        yield f"{count:,} logit_bias", CHAT_PATH, CHAT | {"logit_bias": {str(i): 1 for i in range(count)}}
    for name, value in {
        "stop": ["a" * 1024] * 64,
        "stop of 8 MB": "a" * (MAX_BODY - 200),
        "stop of 90,000 texts": ["ab"] * 90_000,
        "stop_token_ids of 400,000": [1] * 400_000,
        "stop_regex of 8 MB": "(a|" * (MAX_BODY // 3 - 100),
        "stop_regex of 16 patterns": ["(a|b|cd?e*){1,30}x"] * 16,
    }.items():
        yield name, CHAT_PATH, CHAT | {name.split()[0]: value}
    for name, fields in {
        "60 stop strings": {"stop": ["a" * 1000] * 60},
        "a stop pattern": {"stop_regex": ["(a|b|cd?e*){1,6}x"]},
        "700 logit_bias": {"logit_bias": {str(i): 1 for i in range(700)}},
        "a schema": {"json_schema": json.dumps(wide_schema(300))},
    }.items():
        body = {"text": ["hi"] * 128, "sampling_params": [{"max_new_tokens": 1} | fields] * 128}
        yield f"128 prompts with {name} each", GENERATE, body
    yield "a rid of 8 MB", GENERATE, {"text": "hi", "rid": "r" * (MAX_BODY - 100)}
    yield "keep_alive of 8 MB", "/api/chat", MODEL | {"keep_alive": "1" * (MAX_BODY - 100)}


def answers() -> Kinds:
    echoes, listed = LIMIT_S
    fields = {"prompt": SENTENCE * 300, "echo": True, "logprobs": 20, "stream": True, "n": 16}
    yield echoes, COMPLETIONS, COMPLETION | fields
    fields = {"max_tokens": 100, "n": 128, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    yield listed, CHAT_PATH, CHAT | fields


def programs() -> Kinds:
    """Programs near the limits of nodes, of branches and of text."""
    for name, nodes in {
        "4,000 texts": [{"text": "a"}] * 4000 + [GEN],
        "126 branches": [{"fork": {"branches": [[{"text": f"{i} {SENTENCE}"}, GEN] for i in range(126)]}}],
        "20 calls of 7 KB": [{"text": SENTENCE * 150}, GEN] * 20,
        "1,000 turns": [{"role": "user", "content": [{"text": SENTENCE}]}] * 1000 + [GEN],
        "7 texts of 1 MB": [{"text": "<" * 1_000_000}] * 7,
        "1,000 choices": [{"select": {"choices": [f"{i} choice" for i in range(1000)]}}],
    }.items():
        yield f"a program of {name}", PROGRAMS, {"program": nodes}
    variables = {"program": [{"var": "a"}] * 4000 + [GEN], "variables": {"a": "x" * 1_000_000}}
    yield "a program of 4,000 variables", PROGRAMS, variables
    listed = {"program": [{"text": "hi"}, GEN], "variables": {"a": ["x"] * 90_000}}
    yield "a program with a variable of 90,000 texts", PROGRAMS, listed


def anthropic(conversation: list[Any]) -> dict[str, Any]:
    return MODEL | {"max_tokens": 1, "messages": conversation}


def response(value: Any) -> dict[str, Any]:
    return MODEL | {"max_output_tokens": 1, "input": value}


def sglang(text: Any = "hi", **sampling: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 1} | sampling}


def called(calls: list[Any], answered: list[str]) -> list[Any]:
    """A conversation in which the model called tools, some of which answered."""
    results = [{"role": "tool", "tool_call_id": number, "content": "1"} for number in answered]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def call_items(number: str, arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": number, "name": "f", "arguments": arguments}
    return [call, {"type": "function_call_output", "call_id": number, "output": "1"}]


def wide_schema(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(count)}}


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def many_tools(properties: int) -> list[dict[str, Any]]:
    function = {"description": SENTENCE, "parameters": wide_schema(properties)}
    return [{"type": "function", "function": {"name": f"tool_{i}", **function}} for i in range(128)]
