"""`uniqueItems` in the schemas of calls: no array of a call repeats an item, whatever text is around it."""

from __future__ import annotations

import json
import random

import pytest
from byte_grammars import accepts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID

from plait.constrained import Structural
from plait.constrained.specs import Elements, JsonSchema, Notation, Trigger

UNIQUE = {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1]}}
TAGS = {"type": "object", "properties": {"t": UNIQUE}, "additionalProperties": False}
CALL = ("<x>", TAGS, "</x>")


def test_free_text_and_several_calls() -> None:
    good = [
        "",
        "hi [1, 1]",
        '<x>{"t": ["a", "b"]}</x>',
        '<x>{"t": [1]}</x> [1, 1] <x>{"t": [1, "a"]}</x>!',
        "<x>{}</x>",
    ]
    assert all(accepts(Structural([CALL]), *good))
    bad = ['<x>{"t": [1, 1]}</x>', 'a<x>{"t": [1]}</x> <x>{"t": ["a", "a"]}</x>']
    assert not any(accepts(Structural([CALL]), *bad))


def test_each_call_has_its_own_schema() -> None:
    spec = Structural([CALL, ("<y>", {"type": "array", "items": {"type": "integer"}}, "</y>")], free_text=False)
    assert accepts(spec, "<y>[1, 1]</y>", "<x>{}</x><y>[1, 1]</y>", '<y>[1, 1]</y><x>{"t": [1, 1]}</x>') == [
        True,
        True,
        False,
    ]


def test_calls_that_stand_together() -> None:
    calls = [
        ("f(", TAGS, ")"),
        ("g(", {"$ref": "#/$defs/u", "$defs": {"u": {"type": "array", "uniqueItems": True}}}, ")"),
    ]
    spec = Structural(calls, openers=("[f(", "[g("), begin="[", separator=", ", end="]")
    good = ['f( [f({"t": [1, "a"]}), g([1, 2])] f([1, 1])', "[g([[1, 1], [1]])]", "x[g([])]"]
    assert all(accepts(spec, *good))
    assert not any(
        accepts(spec, '[f({"t": []}), g([1, 1])]', "[g([1.0, 1])]", '[f({"t": [1, 1]})]', "[g([]), g([2, 2])]")
    )


def test_a_value_instead_of_calls() -> None:
    unique = JsonSchema({"type": "array", "uniqueItems": True, "items": {"type": ["string", "integer"]}})
    spec = Structural([("<x>", {"type": "array"}, "</x>")], free_text=False, otherwise=unique)
    texts = ['["<x>", 1]', "[1, 1]", "<x>[1, 1]</x>", '["<x>", "<x>"]']
    assert accepts(spec, *texts) == [True, False, True, False]
    behind = Structural([("<x>", UNIQUE, "</x>")], free_text=False, otherwise=unique, otherwise_begin="[all]")
    texts = ['[all]["<x>", 1]', "[all][1, 1]", '<x>["a"]</x>', "<x>[1, 1]</x>", "[1]", '[all]["<x>", "<x>"]']
    assert accepts(behind, *texts) == [True, False, True, False, False, False]


@given(st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_masks_lead_to_valid_calls(seed: int) -> None:
    rng = random.Random(seed)
    spec = Structural(
        [CALL, ("<y>", {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}, "</y>")],
        at_least=2,
        at_most=3,
        free_text=False,
    )
    matcher, text = compile_in_process(spec, BYTE_VOCABULARY).matcher(), bytearray()
    while not matcher.is_terminated and len(text) < 400:
        token = rng.choice(allowed_tokens(matcher, BYTE_VOCABULARY))
        assert matcher.accept(token)
        text += bytes([token - 1]) if token != EOS_ID else b""
    assert matcher.is_terminated
    for part in text.decode().replace("</y>", "</x>").replace("<y>", "<x>").split("<x>")[1:]:
        value = json.loads(part.removesuffix("</x>"))
        items = value if isinstance(value, list) else value.get("t", [])
        assert len(set(map(str, items))) == len(items)


def test_a_rolled_back_item_may_come_again() -> None:
    matcher = compile_in_process(Structural([CALL]), BYTE_VOCABULARY).matcher()
    assert all(matcher.accept(1 + byte) for byte in b'a<x>{"t": [1, ')
    assert not matcher.accept(1 + ord("1"))
    matcher.rollback(3)
    assert all(matcher.accept(1 + byte) for byte in b"] }"[:1] + b"}</x>")


def test_names_that_are_counted_do_not_come_twice_in_a_call() -> None:
    counted = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
    texts = ['{"a": 1}', '{"a": 1, "a": 1}', '{"a": 1, "b": 1}', '{"a": 1, "b": 1, "a": 1}']
    spec = Structural([("<x>", counted, "</x>")])
    assert accepts(spec, *(f"<x>{text}</x> {{}} <x>{texts[2]}</x>" for text in texts)) == [False, False, True, False]
    within = {"type": "object", "properties": {"o": counted}, "required": ["o"], "additionalProperties": False}
    bare = Structural([Trigger("<x>", Notation(within, "<q>"), "</x>")], at_least=1, free_text=False)
    assert accepts(bare, *(f"<x>{{o:{{{inner}}}}}</x>" for inner in ("a:1", "a:1,a:1", "a:1,b:1,c:1"))) == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("limit", [60])
def test_a_call_can_be_completed(limit: int) -> None:
    matcher = compile_in_process(Structural([CALL], at_least=1), BYTE_VOCABULARY).matcher()
    assert all(matcher.accept(1 + byte) for byte in b'<x>{"t": ["a", ')
    completion = matcher.completion(limit)
    assert completion is not None and all(map(matcher.accept, completion)) and matcher.is_accepting


def test_a_raw_string_beside_unique_arrays_is_no_json() -> None:
    """A string that only looks like JSON is not followed as such, in elements without and with their types."""
    properties = {"s": {"type": "string"}, "t": UNIQUE, "n": {"type": ["string", "array"], "uniqueItems": True}}
    schema = {"type": "object", "properties": properties, "required": ["s", "t"], "additionalProperties": False}
    types = (("string", "string"), ("array", "json"))
    plain, typed = (
        Structural([Trigger("<f>", content, "</f>")], at_least=1, free_text=False)
        for content in (
            Elements(schema, "<p={name}>", "</p>"),
            Elements(schema, "<p={name} {type}>", "</p>", types=types),
        )
    )
    text = '<p=s>{"a" "b": [1, 1]</p><p=t>["a", "b"]</p>'
    assert accepts(plain, f"<f>{text}</f>", f"<f>{text}<p=n>[1, 2]</p></f>", f"<f>{text}<p=n>[1, 1]</p></f>") == [
        True,
        True,
        False,
    ]
    text = text.replace("=s", "=s string").replace("=t", "=t json")
    texts = [f"<f>{text}<p=n {kind}>{value}</p></f>" for kind in ("json", "string") for value in ("[1]", "[1, 1]")]
    assert accepts(typed, *texts) == [True, False, True, True]
