"""`plait.LiteLLM`, with the real package, against a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

import plait
from plait import assistant, gen, select, system, user


@dataclass
class Point:
    x: int
    y: int


@plait.function
def talk(s, question):
    s += system("Be brief.") + user(question)
    s += assistant(gen("answer", max_tokens=12))
    s += user("Sure?") + assistant(select("sure", ["yes", "no"]))


@pytest.fixture(scope="module")
def backend(address):
    litellm_backend = plait.LiteLLM("openai/default", base_url=f"{address}/v1", api_key="none", max_retries=0)
    yield litellm_backend
    litellm_backend.close()


def ask(expr, backend, **keywords):
    @plait.function
    def program(s):
        s += user("A point on a map, in JSON.") + assistant(expr)

    return program.run(backend=backend, **keywords)


def test_conversation_equals_that_of_the_openai_backend(backend, address):
    direct = plait.OpenAI("default", f"{address}/v1")
    question = "What is the capital of France?"
    first, second = (talk.run(question, backend=service, temperature=0) for service in (backend, direct))
    assert first.messages() == second.messages() and "Paris" in first["answer"]
    meta = first.get_meta_info("sure")
    assert meta["method"] == "structured output" and meta["choice_scores"] is None
    for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
        assert first.get_meta_info("answer")[name] == second.get_meta_info("answer")[name]
    direct.close()


def test_streams_types_stop_strings_and_samples(backend):
    state = ask(gen("x", max_tokens=16), backend, temperature=0)
    stream = ask(gen("x", max_tokens=16), backend, temperature=0, stream=True)
    pieces = list(stream.text_iter("x"))
    assert "".join(pieces) == state["x"] and len(pieces) > 2
    word = state["x"].split()[1]
    assert ask(gen("x", max_tokens=16, stop=word), backend, temperature=0)["x"] == state["x"].partition(word)[0]
    assert state.get_meta_info("x")["finish_reason"]["type"] == "length"
    for type_, kind in ((Point, Point), (int, int), (Literal["a", "b"], str)):
        assert type(ask(gen("x", type=type_, max_tokens=80), backend, temperature=0)["x"]) is kind
    assert len(ask(gen("x", n=2, max_tokens=4), backend)["x"]) == 2
    states = talk.run_batch([{"question": "Hello"}, {"question": "Who are you?"}], backend=backend)
    assert [state.error() for state in states] == [None, None]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert "a" in json.loads(ask(gen("x", json_schema=schema | {"additionalProperties": False}), backend)["x"])


def test_unsupported_options_and_unknown_models_are_plait_errors(backend, address):
    for options, message in (({"top_k": 3}, "top_k is not supported by"), ({"stop_regex": "a"}, "stop_regex is not")):
        with pytest.raises(plait.ProgramError, match=message):
            ask(gen("x", **options), backend)
    unknown = plait.LiteLLM("openai/nobody", base_url=f"{address}/v1", api_key="none", max_retries=0)
    with pytest.raises(plait.ProgramError, match="'nobody' is not served") as caught:
        ask(gen("x"), unknown)
    assert isinstance(caught.value.__cause__, plait.CallRejected)
    with pytest.raises(plait.InputError, match="chat_template is not supported"):
        plait.LiteLLM("openai/default", chat_template="x")


def test_torch_is_not_imported():
    assert "torch" not in sys.modules
