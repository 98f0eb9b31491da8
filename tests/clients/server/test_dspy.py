"""dspy: predictors over its chat, JSON and XML adapters, tools, and streams."""

from __future__ import annotations

import asyncio
from typing import Literal

import dspy
import pytest

KNOWN_MODEL = "openai/gpt-4o-mini"  # dspy sends schemas only for model names that it knows


def model(base_url, name=KNOWN_MODEL, **more):
    fields = dict(temperature=0.0, max_tokens=200, cache=False, num_retries=0) | more
    return dspy.LM(name, api_base=base_url, api_key="none", **fields)


@pytest.fixture
def lm(known_url):
    return model(known_url)


class Sort(dspy.Signature):
    """Say what a text is about."""

    text: str = dspy.InputField()
    kind: Literal["food", "sport"] = dspy.OutputField(desc="food or sport")
    stars: int = dspy.OutputField(ge=1, le=5)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_lm_call_by_chat_and_responses(base_url, kind) -> None:
    lm = model(base_url, "openai/default", model_type=kind)
    (answer,) = lm("Tell me the capital of France in one short sentence.")
    assert "Paris" in (answer if isinstance(answer, str) else answer["text"])
    assert lm.history[-1]["usage"]["total_tokens"] > 10


def test_json_adapter_returns_typed_fields(lm) -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        prediction = dspy.Predict(Sort)(text="The soup was hot and salty.")
    assert prediction.kind in ("food", "sport") and isinstance(prediction.stars, int) and 1 <= prediction.stars <= 5


def test_chain_of_thought(lm) -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        prediction = dspy.ChainOfThought("question -> answer: bool")(question="Is Paris in France?")
    assert isinstance(prediction.answer, bool) and isinstance(prediction.reasoning, str)


def test_streamed_field_equals_the_prediction(lm) -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="kind")
    program = dspy.streamify(dspy.Predict(Sort), stream_listeners=[listener])

    async def parts():
        with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
            return [part async for part in program(text="The soup was hot and salty.")]

    parts_received = asyncio.run(parts())
    assert isinstance(parts_received[-1], dspy.Prediction) and parts_received[-1].kind in ("food", "sport")
    streamed = "".join(part.chunk for part in parts_received if isinstance(part, dspy.streaming.StreamResponse))
    assert streamed.strip('" ').startswith(parts_received[-1].kind)
