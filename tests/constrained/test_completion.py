"""Completions: the tokens that end a constrained text are valid, few, and within the limit."""

from __future__ import annotations

import json
import random

import pytest
from example_share import share_of
from matchers import allowed_tokens, compile_in_process
from record_schema import RECORD

from plait.constrained import Choices, JsonSchema, Regex, Vocabulary
from plait.constrained.specs import Spec


@pytest.mark.parametrize("spec", [Regex("ab{2,4}(1|11)*yes"), Choices(("aab", "yes please", "a")), Regex("a*(ba){3}")])
def test_completion_of_an_automaton_has_the_fewest_tokens(small: Vocabulary, spec: Spec) -> None:
    grammar = compile_in_process(spec, small)
    rng, matcher = random.Random(3), grammar.matcher()
    for _ in range(4):
        completion = matcher.completion(1000)
        assert completion is not None
        assert matcher.completion(len(completion) - 1) is None or not completion
        for token in allowed_tokens(matcher, small):
            if token not in small.eos_ids:
                assert matcher.accept(token)
                shorter = matcher.completion(1000)
                assert shorter is not None and len(shorter) >= len(completion) - 1
                matcher.rollback(1)
        assert all(matcher.accept(token) for token in completion)
        assert matcher.is_accepting
        matcher.rollback(len(completion))
        next_tokens = [t for t in allowed_tokens(matcher, small) if t not in small.eos_ids]
        if not next_tokens:
            break
        matcher.accept(rng.choice(next_tokens))


@pytest.mark.parametrize("seed", range(share_of(6)))
def test_following_completions_gives_a_complete_record_within_the_budget(smollm: Vocabulary, seed: int) -> None:
    grammar = compile_in_process(JsonSchema(RECORD), smollm)
    rng, matcher, budget, tokens = random.Random(seed), grammar.matcher(), 100 + 10 * seed, list[int]()
    plan = matcher.completion(budget)
    assert plan is not None
    while not matcher.is_accepting:
        choices = [t for t in allowed_tokens(matcher, smollm) if t not in smollm.eos_ids]
        token = rng.choice(choices)
        assert matcher.accept(token)
        completion = matcher.completion(budget - len(tokens) - 1)
        if completion is None:  # the rule for a caller: undo the token and follow the last known completion
            matcher.rollback(1)
            assert all(matcher.accept(token) for token in plan)
            tokens += plan
        else:
            plan = completion
            tokens.append(token)
    assert len(tokens) <= budget
    json.loads(b"".join(smollm.token_bytes[token] for token in tokens))


def test_no_completion_if_the_shortest_value_exceeds_the_limit(smollm: Vocabulary) -> None:
    matcher = compile_in_process(JsonSchema({"type": "string", "minLength": 500}), smollm).matcher()
    assert matcher.completion(20) is None
    assert compile_in_process(JsonSchema(RECORD), smollm).matcher().completion(20) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a*b$"},
        {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        {"type": "string", "pattern": "^(ab|ba)*c$"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "ipv6"},
        {"type": "string", "format": "uri"},
        {"type": "array", "minItems": 7, "items": {"type": "array", "minItems": 2}},
        {"anyOf": [{"type": "string", "minLength": 300}, {"type": "integer"}]},
        {"enum": ["x" * 400, {"a": 1}]},
        {"type": "object", "minProperties": 1},
        {"type": "number", "minimum": 1000, "multipleOf": 7},
        {"type": "object", "properties": {"in": {"pattern": "a$"}, "on": {"pattern": "^x|y$"}}, "required": ["in"]},
    ],
)
def test_short_completions_are_found(smollm: Vocabulary, schema: dict[str, object]) -> None:
    grammar = compile_in_process(JsonSchema(schema), smollm)
    matcher = grammar.matcher()
    completion = matcher.completion(60)
    assert completion is not None
    assert all(matcher.accept(token) for token in completion)
    assert matcher.is_accepting


DATES = {"type": "array", "minItems": 12, "items": {"type": "string", "format": "date-time"}}
HEX = {"type": "array", "minItems": 3, "items": {"type": "string", "pattern": "^[0-9a-f]{40}$"}}


@pytest.mark.parametrize("schema", [DATES, HEX])
def test_a_known_completion_is_adapted_to_other_digits_without_a_new_search(
    small: Vocabulary, schema: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    search = small.completion_search.search
    monkeypatch.setattr(small.completion_search, "search", lambda *args: searches.append(1) or search(*args))
    matcher = compile_in_process(JsonSchema(json.dumps(schema), compact=True), small).matcher()
    assert matcher.completion(2000) is not None and len(searches) == 1
    text = json.dumps(["2017-11-28T19:58:37Z" if schema is DATES else "0123456789" * 4] * 3, separators=(",", ":"))
    for byte in text[:-1].encode():
        assert matcher.accept(small.token_bytes.index(bytes([byte])))
        completion = matcher.completion(2000)
        assert completion is not None
    assert len(searches) <= len(text) // 8  # a day of one month may be invalid in another month
    assert all(matcher.accept(token) for token in completion) and matcher.is_accepting
