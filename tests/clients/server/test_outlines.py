"""outlines: output types over the protocols of OpenAI, vLLM, SGLang and Ollama."""

from __future__ import annotations

from typing import Literal

import ollama
import openai
import outlines
import pytest
from outlines.types import CFG, Regex

ANNA = "Anna is 12 years old."
YEAR = Regex("[12][0-9]{3}")
EBNF = CFG('root ::= "yes" | "no"\n')


@pytest.fixture(params=["openai", "vllm", "sglang"])
def model(base_url, request):
    build = getattr(outlines, f"from_{request.param}")
    built = build(openai.OpenAI(base_url=base_url, api_key="none"), "default")
    built.protocol = request.param
    return built


def test_streamed_text_equals_the_answer(model) -> None:
    fields = dict(temperature=0, max_tokens=20)
    text = model(ANNA, **fields)
    assert text == "".join(model.stream(ANNA, **fields)) != ""


def test_json(model, person) -> None:
    fields = dict(temperature=0, max_tokens=60)
    text = model(ANNA, person, **fields)
    assert text == "".join(model.stream(ANNA, person, **fields))
    assert (person.model_validate_json(text).name, person.model_validate_json(text).age) == ("Anna", 12)


def test_choice_pattern_and_grammar(model) -> None:
    if model.protocol == "openai":
        pytest.skip("2026-11-27: outlines sends OpenAI JSON schemas only")
    fields = dict(temperature=0, max_tokens=20)
    assert model("Is Anna 12?", Literal["yes", "no"], **fields) in ("yes", "no")
    assert len(model("A year: ", YEAR, **fields)) == 4
    assert model("Is Anna 12?", EBNF, **fields) in ("yes", "no")


def test_ollama(address, person) -> None:
    model = outlines.from_ollama(ollama.Client(address), "default")
    assert person.model_validate_json(model(ANNA, person, options={"temperature": 0, "num_predict": 60})).age == 12
