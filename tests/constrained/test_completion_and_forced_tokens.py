"""Ways to the end of a text: right, short, never over the limit; and forced tokens as the tokenizer has them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from plait.constrained import Choices, Grammar, JsonSchema, Regex, Vocabulary, mask_words
from plait.constrained.compiler import build_grammar, compile_spec
from plait.constrained.specs import Spec

RECORD = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string"},
        "age": {"type": "integer", "minimum": 18},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2},
        "kind": {"enum": ["staff", "guest"]},
        "score": {"type": "number", "multipleOf": 0.5},
        "next": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["x"], "properties": {"x": {}}}]},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])  # type: ignore[call-overload]


def grammar_of(spec: Spec, vocabulary: Vocabulary) -> Grammar:
    return build_grammar(compile_spec(spec, vocabulary), vocabulary)


def allowed(grammar: Grammar, matcher: object, vocabulary: Vocabulary) -> list[int]:
    row = np.zeros(mask_words(len(vocabulary)), np.int32)
    matcher.fill_mask(row)  # type: ignore[attr-defined]
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("spec", [Regex("ab{2,4}(1|11)*yes"), Choices(("aab", "yes please", "a")), Regex("a*(ba){3}")])
def test_an_automaton_gives_the_fewest_tokens(small: Vocabulary, spec: Spec) -> None:
    grammar = grammar_of(spec, small)
    rng, matcher = random.Random(3), grammar.matcher()
    for _ in range(4):
        way = matcher.completion(1000)
        assert way is not None
        assert matcher.completion(len(way) - 1) is None or not way
        for token in allowed(grammar, matcher, small):
            if token not in small.eos_ids:
                assert matcher.accept(token)
                shorter = matcher.completion(1000)
                assert shorter is not None and len(shorter) >= len(way) - 1
                matcher.rollback(1)
        assert all(matcher.accept(token) for token in way)
        assert matcher.is_accepting
        matcher.rollback(len(way))
        going_on = [t for t in allowed(grammar, matcher, small) if t not in small.eos_ids]
        if not going_on:
            break
        matcher.accept(rng.choice(going_on))


@pytest.mark.parametrize("seed", range(6))
def test_a_record_is_whole_within_its_budget_from_any_place(smollm: Vocabulary, seed: int) -> None:
    grammar = grammar_of(JsonSchema(RECORD), smollm)
    rng, matcher, budget, tokens = random.Random(seed), grammar.matcher(), 100 + 10 * seed, list[int]()
    plan = matcher.completion(budget)
    assert plan is not None
    while not matcher.is_accepting:
        choices = [t for t in allowed(grammar, matcher, smollm) if t not in smollm.eos_ids]
        token = rng.choice(choices)
        assert matcher.accept(token)
        found = matcher.completion(budget - len(tokens) - 1)
        if found is None:  # the rule for a caller: take it back, and go the way that is known
            matcher.rollback(1)
            assert all(matcher.accept(token) for token in plan)
            tokens += plan
        else:
            plan = found
            tokens.append(token)
    assert len(tokens) <= budget
    json.loads(b"".join(smollm.token_bytes[token] for token in tokens))


def test_a_shortest_value_that_does_not_fit_is_known_at_the_start(smollm: Vocabulary) -> None:
    matcher = grammar_of(JsonSchema({"type": "string", "minLength": 500}), smollm).matcher()
    assert matcher.completion(20) is None
    assert grammar_of(JsonSchema(RECORD), smollm).matcher().completion(20) is None


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
def test_short_ways_are_found(smollm: Vocabulary, schema: dict[str, object]) -> None:
    grammar = grammar_of(JsonSchema(schema), smollm)
    matcher = grammar.matcher()
    way = matcher.completion(60)
    assert way is not None
    assert all(matcher.accept(token) for token in way)
    assert matcher.is_accepting


@pytest.mark.parametrize(
    ("spec", "forced"),
    [
        (JsonSchema(RECORD), '{"name_of_the_person": "'),
        (Regex("hello world(, hello)+!"), "hello world, hello"),
        (Choices(("the whole answer",)), "the whole answer"),
        (Choices(("the answer is yes", "the answer is yesterday")), "the answer is yes"),
    ],
)
def test_forced_tokens_are_the_tokenizers_own(smollm: Vocabulary, spec: Spec, forced: str) -> None:
    matcher = grammar_of(spec, smollm).matcher()
    assert matcher.forced_bytes().decode() == forced
    tokens = matcher.forced_tokens()
    text = b"".join(smollm.token_bytes[token] for token in tokens).decode()
    assert forced.startswith(text)
    assert tokens == list(smollm.encode(forced))[: len(tokens)]
    assert len(text) > len(forced) - 12
    for token in tokens:
        assert token in allowed(None, matcher, smollm)  # type: ignore[arg-type]
        assert matcher.accept(token)


def test_nothing_is_held_back_where_nothing_follows(smollm: Vocabulary) -> None:
    matcher = grammar_of(Choices(("the whole answer",)), smollm).matcher()
    assert matcher.forced_tokens() == list(smollm.encode("the whole answer"))


def test_what_may_be_merged_is_held_back(smollm: Vocabulary) -> None:
    matcher = grammar_of(Regex("the answer is yes(terday)?"), smollm).matcher()
    held = matcher.forced_bytes()[len(b"".join(smollm.token_bytes[t] for t in matcher.forced_tokens())) :]
    assert held
    assert smollm.is_proper_prefix_of_token(held)


DATES = {"type": "array", "minItems": 12, "items": {"type": "string", "format": "date-time"}}
HEX = {"type": "array", "minItems": 3, "items": {"type": "string", "pattern": "^[0-9a-f]{40}$"}}


@pytest.mark.parametrize("schema", [DATES, HEX])
def test_other_digits_than_those_of_a_known_way_seldom_need_a_new_one(
    small: Vocabulary, schema: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought = []
    search = small.completion_search.search
    monkeypatch.setattr(small.completion_search, "search", lambda *given: sought.append(1) or search(*given))
    matcher = grammar_of(JsonSchema(json.dumps(schema), compact=True), small).matcher()
    assert matcher.completion(2000) is not None and len(sought) == 1
    text = json.dumps(["2017-11-28T19:58:37Z" if schema is DATES else "0123456789" * 4] * 3, separators=(",", ":"))
    for byte in text[:-1].encode():
        assert matcher.accept(small.token_bytes.index(bytes([byte])))
        way = matcher.completion(2000)
        assert way is not None
    assert len(sought) <= len(text) // 8  # a day of this month may not fit another
    assert all(matcher.accept(token) for token in way) and matcher.is_accepting
