"""complete=True, lenient schemas and forced tokens with the embedded model."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

import plait
from plait import assistant, gen, user
from plait.constrained import JsonObject, JsonSchema, Regex, Structural
from plait.runtime.process.engine import Engine
from plait.runtime.sampling_params import sampling_params

STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "chapters": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
    },
    "required": ["title", "chapters"],
    "additionalProperties": False,
}


@plait.function
def story(s, max_tokens, **keywords):
    s += user("Write a long story in many chapters.")
    s += assistant(gen("value", max_tokens=max_tokens, **keywords))


@pytest.mark.parametrize("max_tokens", [10, 12, 20, 33, 60])
def test_json_is_complete_within_every_token_budget(runtime, max_tokens):
    for temperature in (0.0, 1.0):
        run = story.run(
            max_tokens, json_schema=STORY, complete=True, temperature=temperature, ignore_eos=True, backend=runtime
        )
        jsonschema_rs.validate(STORY, json.loads(run["value"]))
        meta = run.get_meta_info("value")
        assert meta["finish_reason"]["type"] == "stop"
        assert meta["completion_tokens"] <= max_tokens + 1  # plus a sampled EOS token
    truncated = story.run(12, json_schema=STORY, backend=runtime, temperature=0.0)
    assert truncated.get_meta_info("value")["finish_reason"]["type"] == "length"
    with pytest.raises(ValueError, match=r"line 1"):
        json.loads(truncated["value"])


def test_a_budget_too_small_for_any_value_raises(runtime):
    with pytest.raises(plait.ProgramError, match="no complete value of this constraint that fits into 3 tokens"):
        story.run(3, json_schema=STORY, complete=True, backend=runtime)


def test_complete_accepts_a_spec_and_rejects_invalid_combinations(runtime):
    value = story.run(40, constraint=JsonObject(), complete=True, backend=runtime, temperature=1.0)["value"]
    assert isinstance(json.loads(value), dict)
    with pytest.raises(plait.InputError, match="constraint takes a spec"):
        gen("x", constraint={"type": "object"})
    with pytest.raises(plait.InputError, match="complete needs a constraint"):
        gen("x", complete=True)
    with pytest.raises(plait.InputError, match="regex and constraint exclude each other"):
        gen("x", regex="a", constraint=JsonObject())
    with pytest.raises(plait.ProgramError, match="stop"):
        story.run(9, json_schema=STORY, complete=True, stop="}", backend=runtime)


def test_violations_of_a_lenient_schema_are_reported(runtime):
    twice_b = {"pattern": r"^(b)\1$"}
    a_and_twice_b = {"type": "string", "allOf": [{"pattern": "^a$"}, twice_b]}
    with pytest.raises(plait.ProgramError, match="/pattern"):
        story.run(9, json_schema=a_and_twice_b, backend=runtime)
    lenient = story.run(20, constraint=JsonSchema(a_and_twice_b, lenient=True), backend=runtime)
    assert lenient["value"] == '"a"'
    assert '"a"' in lenient.get_meta_info("value")["violation"]
    satisfiable = JsonSchema({"type": "string", "allOf": [{"pattern": "^bb$"}, twice_b]}, lenient=True)
    assert story.run(20, constraint=satisfiable, backend=runtime).get_meta_info("value")["violation"] is None
    assert "violation" not in story.run(40, json_schema=STORY, backend=runtime).get_meta_info("value")


def test_forced_tokens_equal_tokens_sampled_one_by_one():
    """A call with logprobs samples every token. `deterministic` makes the logits independent of the batch shape."""
    specs = [
        JsonSchema(STORY),
        Regex(r"The answer is (yes|no), because [a-z ]{5,40}\."),
        Structural([("<call>", {"properties": {"x": {"type": "integer"}}}, "</call>")], at_least=1, free_text=False),
    ]
    with Engine(deterministic=True, max_pages=4000) as engine:
        for spec in specs:
            results = []
            for logprobs in (False, True):
                session = engine.client.open_session()
                session.append("Question: what is in the book?\nAnswer: ")
                params = sampling_params(max_tokens=48, temperature=0.0, logprobs=logprobs)
                results.append(session.generate(params, spec).result())
            assert results[0].token_ids == results[1].token_ids
            assert results[1].usage.forced_tokens == 0 < results[0].usage.forced_tokens
