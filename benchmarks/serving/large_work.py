"""Large requests for `loop_gaps.py`: constraints, sampling parameters, answers and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from large_requests import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS,
    GENERATE,
    MAX_BODY,
    SENTENCE,
    Case,
    case,
    nested_schema,
    responses,
    wide_schema,
    with_schema,
)


def work_cases() -> Iterator[Case]:
    yield from constraint_cases()
    yield from sampling_cases()
    yield from answer_cases()
    yield from program_cases()


def constraint_cases() -> Iterator[Case]:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(115):  # with the rest of the body near the limit of 128 levels
        deep = {"items": deep}
    yield case("a schema of 115 levels", CHAT_PATH, with_schema(deep))
    for levels in (30, 60):
        yield case(f"a schema of {levels} levels", CHAT_PATH, with_schema(nested_schema(levels)))
    for count in (5000, 20_000):
        yield case(f"a schema of {count:,} properties", CHAT_PATH, with_schema(wide_schema(count)))
    for name, schema in {
        "400,000 values": {"enum": list(range(400_000))},
        "400,000 texts": {"enum": [f"{i}" for i in range(400_000)]},
        "a text of 7 MB": {"const": SENTENCE * 160_000},
        "a description of 7 MB": {"type": "string", "description": SENTENCE * 160_000},
        "a pattern of 7 MB": {"type": "string", "pattern": "a" * 7_000_000},
        "300,000 required names": {"type": "object", "required": [f"a{i}" for i in range(300_000)]},
        "an unknown keyword of 7 MB": {"k" * 7_000_000: 1},
        "19,000 references": {"anyOf": [{"$ref": "#/$defs/a"}] * 19_000, "$defs": {"a": {"type": "string"}}},
    }.items():
        yield case(f"a schema with {name}", CHAT_PATH, with_schema(schema))
        sampling = {"json_schema": json.dumps(schema), "max_new_tokens": 1}
        yield case(f"SGLang's schema with {name}", GENERATE, {"text": "hi", "sampling_params": sampling})
    tag = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {"const": "a" * 7_000_000}, "end": ""}]}
    sampling = {"structural_tag": json.dumps(tag | {"triggers": ["<a>"]}), "max_new_tokens": 1}
    yield case("a structural tag of 7 MB", GENERATE, {"text": "hi", "sampling_params": sampling})
    many = {"json_schema": json.dumps([[1]] * 1_000_000)}
    yield case("SGLang's schema of 1,000,000 arrays", GENERATE, {"text": "hi", "sampling_params": many})
    for name in ("regex", "ebnf", "lark"):
        yield case(f"a {name} of 8 MB", CHAT_PATH, CHAT | {name: "(a|" * (MAX_BODY // 3 - 100)})
    yield case("10,000 choices", CHAT_PATH, CHAT | {"choices": [f"choice {i}" for i in range(10_000)]})
    yield case("90,000 choices", CHAT_PATH, CHAT | {"choices": [f"choice {i}" for i in range(90_000)]})


def sampling_cases() -> Iterator[Case]:
    for count in (1024, 19_000, 500_000):
        yield case(f"{count:,} logit_bias", CHAT_PATH, CHAT | {"logit_bias": {str(i): 1 for i in range(count)}})
    for name, value in {
        "stop": ["a" * 1024] * 64,
        "stop of 8 MB": "a" * (MAX_BODY - 200),
        "stop of 90,000 texts": ["ab"] * 90_000,
        "stop_token_ids of 400,000": [1] * 400_000,
        "stop_regex of 8 MB": "(a|" * (MAX_BODY // 3 - 100),
        "stop_regex of 16 patterns": ["(a|b|cd?e*){1,30}x"] * 16,
    }.items():
        yield case(name, CHAT_PATH, CHAT | {name.split()[0]: value})
    params = {"max_new_tokens": 1, "stop": ["a" * 1000] * 60}
    yield case(
        "128 prompts with 60 stop strings each", GENERATE, {"text": ["hi"] * 128, "sampling_params": [params] * 128}, 6
    )
    params = {"max_new_tokens": 1, "stop_regex": ["(a|b|cd?e*){1,6}x"]}
    yield case(
        "128 prompts with a stop pattern each", GENERATE, {"text": ["hi"] * 128, "sampling_params": [params] * 128}, 6
    )
    params = {"max_new_tokens": 1, "logit_bias": {str(i): 1 for i in range(700)}}
    yield case(
        "128 prompts with 700 logit_bias each", GENERATE, {"text": ["hi"] * 128, "sampling_params": [params] * 128}, 6
    )
    params = {"max_new_tokens": 1, "json_schema": json.dumps(wide_schema(300))}
    yield case("128 prompts with a schema each", GENERATE, {"text": ["hi"] * 128, "sampling_params": [params] * 128}, 6)
    yield case("a rid of 8 MB", GENERATE, {"text": "hi", "rid": "r" * (MAX_BODY - 100)})
    yield case("keep_alive of 8 MB", "/api/chat", {"model": "default", "keep_alive": "1" * (MAX_BODY - 100)})


def answer_cases() -> Iterator[Case]:
    """Requests with large answers, which are long after the prompts are computed."""
    answer = {"max_tokens": 2000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    yield case("2,000 tokens with 20 logprobs", CHAT_PATH, CHAT | answer, 60)
    sixteen = CHAT | answer | {"max_tokens": 500, "n": 16}
    yield case("16 of 500 tokens with 20 logprobs", CHAT_PATH, sixteen, 60)
    yield case("the same as a stream", CHAT_PATH, sixteen | {"stream": True}, 60)
    for stream in (False, True):
        kind = " as a stream" if stream else ""
        echo = {"echo": True, "logprobs": 20, "stream": stream}
        yield case(
            f"an echo of 3,000 tokens with logprobs{kind}",
            COMPLETIONS,
            COMPLETION | echo | {"prompt": SENTENCE * 300},
            60,
        )
        yield case(
            f"16 echoes of 3,000 tokens with logprobs{kind}",
            COMPLETIONS,
            COMPLETION | echo | {"prompt": SENTENCE * 300, "n": 16},
            60,
        )
        prompt_logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "stream": stream}
        sglang = {"text": SENTENCE * 300, "sampling_params": {"max_new_tokens": 1}} | prompt_logprobs
        yield case(f"3,000 prompt tokens with 20 logprobs{kind}", GENERATE, sglang, 60)
        sglang = {"text": "hi", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}} | prompt_logprobs
        yield case(f"1,000 tokens with 20 logprobs of SGLang{kind}", GENERATE, sglang, 60)
        response = responses("hi") | {
            "max_output_tokens": 1000,
            "top_logprobs": 20,
            "stream": stream,
            "include": ["message.output_text.logprobs"],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 9000}}},
        }
        yield case(f"a response of 1,000 tokens with 20 logprobs{kind}", "/v1/responses", response, 60)
        ollama = {
            "model": "default",
            "prompt": "hi",
            "raw": True,
            "logprobs": True,
            "top_logprobs": 20,
            "stream": stream,
            "options": {"num_predict": 1000},
        }
        yield case(f"1,000 tokens with 20 logprobs of Ollama{kind}", "/api/generate", ollama, 60)
    yield case(
        "128 answers of 100 tokens with 20 logprobs", CHAT_PATH, CHAT | answer | {"max_tokens": 100, "n": 128}, 60
    )
    yield case("128 answers of 100 tokens", CHAT_PATH, CHAT | {"max_tokens": 100, "n": 128, "ignore_eos": True}, 60)


def program_cases() -> Iterator[Case]:
    """Programs near the limits of nodes, of branches and of text."""
    gen = {"gen": {"max_tokens": 1}}
    texts = [{"text": "a"} for _ in range(4000)]
    wide = [{"fork": {"branches": [[{"text": f"{i} {SENTENCE}"}, gen] for i in range(126)]}}]
    long = [{"text": SENTENCE * 150}, gen] * 20
    many = [{"role": "user", "content": [{"text": SENTENCE}]} for _ in range(1000)]
    variables = [{"var": "a"}] * 4000 + [gen]
    for name, nodes in (
        ("4,000 texts", [*texts, gen]),
        ("126 branches", wide),
        ("20 calls of 7 KB", long),
        ("1,000 turns", [*many, gen]),
        ("7 texts of 1 MB", [{"text": "<" * 1_000_000}] * 7),
    ):
        yield case(f"a program of {name}", "/v1/programs", {"program": nodes})
    yield case(
        "a program of 4,000 variables", "/v1/programs", {"program": variables, "variables": {"a": "x" * 1_000_000}}
    )
    yield case(
        "a program with a variable of 90,000 texts",
        "/v1/programs",
        {"program": [{"text": "hi"}, gen], "variables": {"a": ["x"] * 90_000}},
    )
    selects = [{"select": {"choices": [f"{i} choice" for i in range(1000)]}}]
    yield case("a program with 1,000 choices", "/v1/programs", {"program": selects})
    tops = {"gen": {"max_tokens": 1000, "ignore_eos": True, "top_logprobs_num": 20, "return_logprob": True}}
    yield case("a program's 1,000 tokens with 20 logprobs", "/v1/programs", {"program": [{"text": "hi"}, tops]}, 60)
