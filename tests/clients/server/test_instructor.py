"""instructor: answers as Pydantic models by tools and by schemas, whole, partial and one after the other."""

from __future__ import annotations

import asyncio

import instructor
import openai
import pytest

ASK = [{"role": "user", "content": "Anna is 12 years old."}]
# not Mode.JSON, which asks for the schema in words only: more than so small a model can follow
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def client(base_url, request):
    plain = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=request.param, model="default", temperature=0, max_tokens=100)


def test_a_model(client, person) -> None:
    found, raw = client.chat.completions.create_with_completion(messages=ASK, response_model=person)
    assert isinstance(found, person) and raw.usage.completion_tokens > 0
    assert (found.name, found.age) == ("Anna", 12)


def test_a_model_while_it_comes(client, person) -> None:
    stages = list(client.chat.completions.create_partial(messages=ASK, response_model=person))
    assert len(stages) > 1 and isinstance(stages[-1].name, str) and isinstance(stages[-1].age, int)
    ages = [stage.age for stage in stages]
    assert ages[0] is None and ages[-1] is not None


def test_the_asynchronous_client(base_url, person) -> None:
    plain = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    ask = client.chat.completions.create(model="default", messages=ASK, response_model=person, temperature=0)
    found = asyncio.run(ask)
    assert isinstance(found, person) and (found.name, found.age) == ("Anna", 12)
