"""JSON answers are complete when they end: for realistic schemas, any token limit and every protocol.

The small model's weights are random, so it ends no value: strings and lists go on until the runtime closes
them.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest
from pydantic_models import PYDANTIC
from real_schemas import REAL
from schema_strategies import reference_validator

from plait.constrained.specs import JsonString, Lark, Regex, Structural, Trigger
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.generation.json_completion import with_json_completion

NAMES = ["Team", "Node", "Tree", "Owner", "Numbers", "Optionals", "Nested", "Maps", "Order", "Event"]
TEXT, NUMBER, TEXTS = {"type": "string"}, {"type": "number"}, {"type": "array", "items": {"type": "string"}}
OWN = {
    "record": {"properties": {"a": TEXT, "b": NUMBER, "c": {"type": "integer"}}, "required": ["a", "b", "c"]},
    "closed": {"properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False},
    "open": {},
    "numbers": {"properties": {"a": {"type": "array", "items": NUMBER}}, "required": ["a"]},
    "shares": {"properties": {"a": {"type": "number", "minimum": 0, "maximum": 1}}, "required": ["a"]},
    "prices": {"properties": {"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.95}}, "required": ["a"]},
    "lists": {"properties": {"a": {"type": "array", "items": TEXTS}, "b": TEXTS}, "required": ["a", "b"]},
    "maybe": {"properties": {"a": {"anyOf": [TEXT, {"type": "null"}]}, "b": {"type": ["number", "null"]}}},
    "either": {"properties": {"a": {"anyOf": [NUMBER, TEXTS, {"type": "object"}]}}, "required": ["a"]},
    "map": {"properties": {"a": {"additionalProperties": NUMBER, "type": "object"}}, "required": ["a"]},
    "dates": {"properties": {"a": {"type": "string", "format": "date-time"}, "b": TEXT}, "required": ["a", "b"]},
    "long": {"properties": {f"field_number_{i}": TEXT for i in range(40)}},
}
OWN["long"]["required"] = list(OWN["long"]["properties"])
SCHEMAS = {name: {"type": "object", **schema} for name, schema in OWN.items()}
SCHEMAS |= {name: schema for name, schema in PYDANTIC.items() if name.split("/")[-1] in NAMES}
SCHEMAS |= {name: REAL[name] for name in sorted(REAL)[::6]}
ASK = [{"role": "user", "content": "Fill this in."}]
TOOL = {"name": "note", "parameters": SCHEMAS["record"]}


def json_schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def create(client, schema, max_tokens, **more):
    fields = {"model": "default", "messages": ASK, "temperature": 1, "seed": 7, "max_tokens": max_tokens} | more
    return client.chat.completions.create(response_format=json_schema_format(schema), **fields)


def create_and_stream(client, **fields):
    """Returns the complete answer after checking that a stream of it is the same."""
    fields = {"model": "default", "messages": ASK, "temperature": 0, **fields}
    answer = client.chat.completions.create(**fields)
    texts, reasons, calls = {}, {}, {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
            for call in choice.delta.tool_calls or ():
                calls[call.index] = calls.get(call.index, "") + call.function.arguments
    for choice in answer.choices:
        assert (texts[choice.index], reasons[choice.index]) == (choice.message.content or "", choice.finish_reason)
        for index, call in enumerate(choice.message.tool_calls or ()):
            assert calls[index] == call.function.arguments
    return answer


def finite(text: str) -> float:
    """The nearest finite number: the validator takes no infinity, which Python makes of 1e999."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def test_answer_is_complete_if_max_tokens_allow_one(client) -> None:
    """A schema whose shortest value is longer ends with "length", or is a 400 with `complete`."""
    assert len(SCHEMAS) >= 20

    def run(case):
        name, max_tokens = case
        schema = SCHEMAS[name]
        try:
            choice = create(client, schema, max_tokens).choices[0]
        except openai.BadRequestError as error:
            return error.code
        if choice.finish_reason == "length":
            with pytest.raises(openai.BadRequestError, match="no complete value"):
                create(client, schema, max_tokens, extra_body={"complete": True})
            return "length"
        value = json.loads(choice.message.content, parse_float=finite)
        assert reference_validator(schema).is_valid(value), (name, choice.message.content)
        return "stop"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(run, [(name, max_tokens) for name in SCHEMAS for max_tokens in (24, 64, 200)]))
    assert outcomes.count("stop") >= 45
    assert outcomes.count("length") >= 3
    assert outcomes.count("invalid_constraint") <= 9


def test_completion_does_not_change_an_answer_that_ends_before_the_limit(client) -> None:
    few = {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 3, "maxItems": 3}
    schema = {"type": "object", "properties": {"a": few}, "required": ["a"], "additionalProperties": False}
    completed, free = (create(client, schema, 200, extra_body={"complete": complete}) for complete in (True, False))
    assert completed.choices[0].message.content == free.choices[0].message.content
    assert free.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "more", [{"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"extra_body": {"ignore_eos": True}}]
)
def test_completion_with_choices_logprobs_and_streams(client, more) -> None:
    response_format = json_schema_format(SCHEMAS["record"])
    answer = create_and_stream(client, response_format=response_format, max_tokens=40, seed=3, **more)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMAS["record"])
        assert choice.finish_reason == "stop"
        if choice.logprobs:
            assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert answer.usage.completion_tokens <= 40 * len(answer.choices)


def test_complete_false_and_stop_strings_turn_completion_off(client) -> None:
    for more in ({"extra_body": {"complete": False}}, {"stop": ["never written"]}):
        choice = create(client, SCHEMAS["record"], 30, **more).choices[0]
        assert choice.finish_reason == "length"
        with pytest.raises(json.JSONDecodeError):
            json.loads(choice.message.content)
    with pytest.raises(openai.BadRequestError, match="complete"):
        create(client, SCHEMAS["record"], 30, stop=["x"], extra_body={"complete": True})
    with pytest.raises(openai.BadRequestError, match="'complete' needs a constraint"):
        client.chat.completions.create(model="default", messages=ASK, extra_body={"complete": True})


def test_complete_true_completes_any_constraint(client) -> None:
    fields = {"model": "default", "prompt": "x", "max_tokens": 12}
    for complete, reason in ((None, "length"), (True, "stop")):
        extra = {"regex": "[a-z]{4,90}END"} | ({} if complete is None else {"complete": complete})
        choice = client.completions.create(**fields, extra_body=extra).choices[0]
        assert choice.finish_reason == reason
        assert choice.text.endswith("END") is bool(complete)


def test_compact_json_has_no_spaces(client) -> None:
    spaced = create(client, SCHEMAS["record"], 60).choices[0].message.content
    compact = create(client, SCHEMAS["record"], 60, extra_body={"compact": True}).choices[0].message.content
    assert spaced.startswith('{"a": "')
    assert compact.startswith('{"a":"')


def test_tool_calls_are_complete(client) -> None:
    answer = create_and_stream(
        client, tools=[{"type": "function", "function": TOOL}], tool_choice="required", max_tokens=48
    )
    (*_, call) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["record"])


def test_calls_with_a_grammar_are_not_completed_by_default() -> None:
    """The search finds no text of many grammars, and every call would seem too long for the answer."""

    def is_completed(*contents) -> bool:
        calls = Structural([Trigger(f"<{place}>", content, "<end>") for place, content in enumerate(contents)])
        return with_json_completion(SamplingParams(), calls).complete

    assert is_completed({"type": "object"}, JsonString(Regex("a+")))
    assert not is_completed({"type": "object"}, JsonString(Lark("start: /a+/")))
    assert not is_completed(Lark("start: /a+/"), {"type": "object"})


def test_responses_are_complete(client) -> None:
    text_format = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMAS["record"]}}
    answer = client.responses.create(model="default", input="hi", text=text_format, max_output_tokens=40)
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), SCHEMAS["record"])


def test_ollamas_format_and_anthropics_tools_are_complete(http) -> None:
    schema = SCHEMAS["record"]
    body = {"model": "default", "messages": ASK, "stream": False, "format": schema, "options": {"num_predict": 40}}
    answer = http.post("/api/chat", json=body).json()
    assert answer["done_reason"] == "stop"
    jsonschema.validate(json.loads(answer["message"]["content"]), schema)
    tool = {"name": "note", "input_schema": schema}
    body = {"model": "default", "messages": ASK, "max_tokens": 48, "tools": [tool], "tool_choice": {"type": "any"}}
    answer = http.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use"
    jsonschema.validate(answer["content"][-1]["input"], schema)


def test_sglangs_json_schema_is_complete(http) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0, "json_schema": json.dumps(SCHEMAS["record"])}
    answer = http.post("/generate", json={"text": "x", "sampling_params": sampling}).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    jsonschema.validate(json.loads(answer["text"]), SCHEMAS["record"])
    sampling["stop"] = ["never written"]
    answer = http.post("/generate", json={"text": "x", "sampling_params": sampling}).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
