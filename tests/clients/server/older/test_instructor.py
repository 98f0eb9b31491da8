"""instructor: Pydantic models by tools and by JSON schemas, complete and partial."""

from __future__ import annotations

import asyncio

import instructor
import openai
import pytest

ASK = [{"role": "user", "content": "Anna is 12 years old."}]
# not Mode.JSON: it only describes the schema in the prompt, which the small model does not follow
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def client(base_url, request):
    openai_client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return instructor.from_openai(openai_client, mode=request.param, model="default", temperature=0, max_tokens=100)


def test_response_model(client, person) -> None:
    extracted, raw = client.chat.completions.create_with_completion(messages=ASK, response_model=person)
    assert isinstance(extracted, person) and raw.usage.completion_tokens > 0
    assert (extracted.name, extracted.age) == ("Anna", 12)


def test_partial_response_model(client, person) -> None:
    stages = list(client.chat.completions.create_partial(messages=ASK, response_model=person))
    assert len(stages) > 1 and isinstance(stages[-1].name, str) and isinstance(stages[-1].age, int)
    ages = [stage.age for stage in stages]
    assert ages[0] is None and ages[-1] is not None


def test_async_client(base_url, person) -> None:
    openai_client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
    ask = client.chat.completions.create(model="default", messages=ASK, response_model=person, temperature=0)
    extracted = asyncio.run(ask)
    assert isinstance(extracted, person) and (extracted.name, extracted.age) == ("Anna", 12)
