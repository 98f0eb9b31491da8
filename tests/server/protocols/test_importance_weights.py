"""`weight` beside the answers of every protocol, for values drawn with `particles` or `exact`."""

from __future__ import annotations

import json
import math

import pytest

from plait.lang.core.value_weight import value_weight
from plait.lang.meta_info import generation_meta
from plait.runtime.call_reports import ExactInfo, Usage
from plait.runtime.client.call import CallResult
from plait.runtime.server.protocols.shared import importance_weight

VALUE = " (yes|no)"
LIMIT = {"model": "default", "max_tokens": 8, "seed": 3}
ASK = [{"role": "user", "content": "Say yes or no."}]
SCHEMA = {"enum": ["yes", "no"]}
OLLAMA = {"model": "default", "format": SCHEMA}
OLLAMA_OPTIONS = {"num_predict": 8, "seed": 3, "top_k": 0, "top_p": 1.0}  # a random model: all tokens
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
REQUESTS = {
    "/v1/chat/completions": lambda how: LIMIT | how | {"messages": ASK, "regex": VALUE},
    "/v1/completions": lambda how: LIMIT | how | {"prompt": "hi", "regex": VALUE},
    "/v1/responses": lambda how: (
        {"model": "default", "input": "hi", "max_output_tokens": 16, "text": {"format": FORMAT}} | how
    ),
    "/api/chat": lambda how: OLLAMA | {"messages": ASK, "options": OLLAMA_OPTIONS | how},
    "/api/generate": lambda how: OLLAMA | {"prompt": "hi", "options": OLLAMA_OPTIONS | how},
    "/generate": lambda how: {"text": "hi", "sampling_params": {"max_new_tokens": 8, "regex": VALUE} | how},
    "/v1/programs": lambda how: {"program": [{"text": "hi"}, {"gen": {"max_tokens": 8, "regex": VALUE} | how}]},
}
WAYS = {"particles": {"particles": 3}, "exact": {"exact": True}}


def weights_in(value) -> list[dict[str, float]]:
    """All fields `weight` within JSON."""
    if isinstance(value, list):
        return [found for item in value for found in weights_in(item)]
    if not isinstance(value, dict):
        return []
    own = [value["weight"]] if "weight" in value else []
    return own + [found for item in value.values() for found in weights_in(item)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", REQUESTS)
def test_answers_and_streams_have_the_weight(http, path, way) -> None:
    body = REQUESTS[path](WAYS[way])
    answer = http.post(path, json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    (weight,) = weights_in(answer.json())
    assert weight["constrained_logprob"] == pytest.approx(weight["logprob"] - weight["log_weight"])
    assert weight["logprob"] < 0 and weight["model_steps"] >= (way == "particles"), (
        "the cache may spare exact all steps"
    )
    assert ("effective_sample_size" in weight) == (way == "particles")
    with http.stream("POST", path, json=body | {"stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in "".join(stream.iter_text()).splitlines()]
    found = weights_in([json.loads(line) for line in lines if line.startswith("{")])
    assert len(found) == 1 and math.isfinite(found[0]["log_weight"])


def test_every_choice_has_its_own_weight(http) -> None:
    body = REQUESTS["/v1/completions"](WAYS["particles"])
    choices = http.post("/v1/completions", json=body | {"n": 3, "temperature": 2}).json()["choices"]
    assert len({choice["weight"]["log_weight"] for choice in choices}) > 1


def test_values_sampled_under_a_mask_have_no_weight(http) -> None:
    assert weights_in(http.post("/v1/completions", json=REQUESTS["/v1/completions"]({})).json()) == []


def test_openapi_documents_the_field(http) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert "constrained_logprob" in schemas["ImportanceWeight"]["properties"]
    for name in ("ChatChoice", "CompletionChoice", "ResponseBody", "OllamaChat", "OllamaGenerated", "CallAnswer"):
        assert "weight" in schemas[name]["properties"], name


def test_a_value_whose_probability_is_too_small_for_a_float_has_a_weight() -> None:
    exact = ExactInfo(logprob=-2000.0, mass_low=0.0, mass_high=0.25, model_steps=9)
    result = CallResult(text="", token_ids=[], finish_reason="stop", usage=Usage(), exact=exact)
    weight = importance_weight(result)
    assert weight.log_weight == pytest.approx((math.log(0.25) - 2000) / 2)
    assert weight.constrained_logprob == pytest.approx(weight.logprob - weight.log_weight)
    meta = generation_meta(result, tokenizer=None)
    assert meta["exact"]["constrained_logprob"] == [pytest.approx(-2000 - math.log(0.25)), 0.0]
    assert value_weight(meta, "") == pytest.approx((weight.log_weight, weight.constrained_logprob))
