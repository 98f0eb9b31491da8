"""Keyword arguments: Python reads what masks allow as valid arguments, and valid arguments as Python writes pass."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

from byte_grammars import accepts, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID, reference_validator

from plait.constrained import GrammarError, Structural
from plait.constrained.specs import Keywords, Trigger

TREE = {
    "type": "object",
    "properties": {"l": {"$ref": "#/$defs/t"}, "v": {"type": "boolean"}},
    "additionalProperties": False,
}
SCALARS = st.sampled_from(
    [
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": ["number", "null"]},
        {"not": {"type": "integer"}},
        {"allOf": [{"enum": ["red", "a\0", 2.5, 3]}, {"not": {"type": "integer"}}]},
        {"enum": ["a\0", [None, "\x7f"]]},
        {"type": "boolean"},
        {"enum": ["red", "None", None, True, 3, [True, {"k": None}]]},
        {
            "anyOf": [
                {"type": "string", "pattern": "^[a-c]+$"},
                {"type": "boolean"},
                {"type": "array", "items": {"type": "null"}},
            ]
        },
        {"type": "array", "items": {"type": ["boolean", "integer"]}, "uniqueItems": True, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "string"}, True], "items": False},
        {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        {"type": "object", "additionalProperties": {"enum": [True]}},
        {"$ref": "#/$defs/t"},
        {},
    ]
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "long_name", "c.d"]), SCALARS, max_size=3).flatmap(
    lambda properties: st.builds(
        lambda required, is_open: {
            **{"type": "object", "properties": properties, "required": required, "additionalProperties": is_open},
            "$defs": {"t": TREE},
        },
        st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
        st.booleans(),
    )
)
VALUES = st.sampled_from(
    ["", "a", "red", "None", 'q"', "\n", None, True, False, 3, -1, 2.5, [], [None], [True, 1], [1, 1], ["a", {}]]
    + [{}, {"b": True}, {"b": 1, "c": [None]}, {"l": {"v": False}}, {"x": True}, [True, {"k": None}]]
    + ["a\0", [None, "\x7f"]]
)


def spec_of(schema: Any) -> Structural:
    return Structural(
        [Trigger("f(", Keywords(schema), ")")], begin="[", separator=", ", end="]", free_text=False, at_least=1
    )


def is_possible(schema: Any) -> bool:
    try:
        compile_in_process(spec_of(schema), BYTE_VOCABULARY)
    except GrammarError as error:
        return "required" not in error.reason
    return True


def written(value: Any) -> str:
    """A value as the grammar's Python has it: strings as JSON."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {written(inner)}' for name, inner in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


@given(OBJECTS, st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_python_reads_what_masks_allow(schema: Any, seed: int) -> None:
    if not is_possible(schema):
        return
    rng, matcher, tokens = (
        random.Random(seed),
        compile_in_process(spec_of(schema), BYTE_VOCABULARY).matcher(),
        list[int](),
    )
    for _ in range(rng.randrange(1, 80)):
        allowed = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if 1 + 32 <= token < 1 + 127]
        if not allowed:
            break
        likely = [token for token in allowed if bytes([token - 1]) in b'"[]{}(),=:TFNabl1']
        tokens.append(rng.choice(likely if likely and rng.random() < 0.8 else allowed))
        assert matcher.accept(tokens[-1])
    completion = matcher.completion(1000)
    assert completion is not None, (schema, bytes(token - 1 for token in tokens))
    text = bytes(token - 1 for token in [*tokens, *completion]).decode()
    calls = ast.parse(text, mode="eval").body
    assert isinstance(calls, ast.List) and calls.elts
    for call in calls.elts:
        assert isinstance(call, ast.Call) and not call.args
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert reference_validator(schema).is_valid(arguments), (schema, text)


@given(OBJECTS, st.dictionaries(st.sampled_from(["a", "b", "long_name", "new"]), VALUES, max_size=3))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_valid_arguments_are_accepted(schema: Any, arguments: dict[str, Any]) -> None:
    if not is_possible(schema):
        return
    arguments = {name: arguments[name] for name in (*schema["properties"], "new") if name in arguments}
    text = ", ".join(f"{name}={written(value)}" for name, value in arguments.items())
    is_listed = schema["additionalProperties"] or "new" not in arguments
    expected = is_listed and reference_validator(schema).is_valid(arguments)
    assert accepts(spec_of(schema), f"[f({text})]") == [expected], (schema, text)


def test_a_required_name_that_is_no_identifier_is_refused() -> None:
    error = refusal(spec_of({"type": "object", "properties": {"a-b": {}}, "required": ["a-b"]}))
    assert error.where == "/triggers/0/content/properties/a-b" and EOS_ID == 0
