"""`reasoning` in chat requests: reasoning apart from a constrained answer, whole and streamed."""

from __future__ import annotations

import json

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def ask(client, budget, **keywords):
    fields = {"model": "default", "messages": MESSAGES, "max_tokens": 60, "response_format": FORMAT, "seed": 4}
    body = {"reasoning": budget, **keywords.pop("extra_body", {})}
    return client.chat.completions.create(**fields | keywords, extra_body=body)


@pytest.mark.parametrize("budget", [{"max_tokens": 6}, {"max_tokens": 0}, {}])
def test_the_answer_is_valid_and_reasoning_is_apart(client, budget):
    answer = ask(client, budget, n=2)
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    for choice in answer.choices:
        assert type(json.loads(choice.message.content)["n"]) is int
        assert "</think>" not in (getattr(choice.message, "reasoning_content", None) or "")
        assert bool(getattr(choice.message, "reasoning_content", None)) == (budget != {"max_tokens": 0})


def test_a_stream_sends_reasoning_before_content(client):
    whole = ask(client, {"max_tokens": 6}).choices[0].message
    kinds, reasoning, content = [], "", ""
    for chunk in ask(client, {"max_tokens": 6}, stream=True):
        delta = chunk.choices[0].delta
        if piece := getattr(delta, "reasoning_content", None):
            reasoning += piece
            kinds.append("reasoning")
        if delta.content:
            content += delta.content
            kinds.append("content")
    assert (reasoning, content) == (whole.reasoning_content, whole.content)
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) == 2


def test_without_reasoning_the_answer_begins_at_once(client):
    for answer in (ask(client, {"enabled": False}), ask(client, None)):
        assert type(json.loads(answer.choices[0].message.content)["n"]) is int
        assert getattr(answer.choices[0].message, "reasoning_content", None) is None
        assert answer.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("budget", "keywords", "message"),
    [
        ({"max_tokens": -1}, {}, "max_tokens"),
        ({"effort": "huge"}, {}, "effort"),
        ({"effort": "high"}, {"extra_body": {"reasoning_effort": "low"}}, "contradict each other"),
        ({}, {"extra_body": {"exact": True}, "temperature": 1.0}, "exact cannot be combined with reasoning"),
    ],
)
def test_wrong_requests_are_refused(client, budget, keywords, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, budget, **keywords)
