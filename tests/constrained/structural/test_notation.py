"""Notation: what masks allow reads back as valid arguments, and valid arguments as a template writes them pass."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from byte_grammars import accepts, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process
from schema_strategies import reference_validator

from plait.constrained import GrammarError, Structural, Vocabulary
from plait.constrained.specs import Notation, Trigger

QUOTE, CONTROL = "<q>", 257  # the id of the quote where it is a control token
SHOWN = "\ufdd0"  # how that token is shown
VOCABULARY = Vocabulary(
    (b"", *(bytes([byte]) for byte in range(256)), b"", b"<q>", b",<q>a<q>", b"q>,", b"]}"),
    (0,),
    lambda text: [1 + b for b in text.encode()],
)
TREE = {
    "type": "object",
    "properties": {"l": {"$ref": "#/$defs/t"}, "K": {"type": "boolean"}},
    "additionalProperties": False,
}
VALUES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c<]+$"},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": ["number", "null"]},
        {"not": {"type": "integer"}},
        {"enum": ["\0a\x7f", ["\0"], 3]},
        {"type": ["string", "boolean"]},
        {"enum": ["red", "None", "a<q>", None, True, 3, ["a", {"k": None}]]},
        {"anyOf": [{"type": "string", "minLength": 2}, {"type": "boolean"}, {"type": "array", "items": {"enum": [1]}}]},
        {"type": "array", "items": {"type": ["string", "integer"], "maxLength": 1}, "uniqueItems": True, "maxItems": 4},
        {"type": "array", "items": {"enum": ["a", 1, None, True]}, "uniqueItems": True},
        {"type": "array", "prefixItems": [{"type": "string"}, True], "items": False},
        {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}, "required": ["b"]},
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        {"$ref": "#/$defs/t"},
        {},
    ]
)
COUNTED = st.sampled_from(
    [
        {"type": "object", "properties": {"b": {}, "a": {}, "c": {}}, "minProperties": 2, "required": ["c"]},
        {"type": "object", "properties": {"b": {}, "a": {}}, "maxProperties": 1},
    ]
)
NAMES = ["a", "B", "long_name", "c.d", "e:f"]


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES), values, max_size=3).flatmap(
        lambda properties: st.builds(
            lambda required, is_open: {
                **{"type": "object", "properties": properties, "required": required, "additionalProperties": is_open},
                "$defs": {"t": TREE},
            },
            st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
            st.booleans(),
        )
    )


ARGUMENTS = st.sampled_from(
    ["", "a", "b<", "red", "None", "a\nb", "]}", None, True, False, 3, -1, 2.5, [], [None], ["a", 1], [1, 1]]
    + [["a", "a"], ["<q", "<"], {}, {"b": "x"}, {"a": [None], "b": "x"}, {"l": {"K": False}}, {"x": True}, {"x_1": 3}]
    + [["a", {"k": None}], "a<q>", {"B": 1, "a": 2, "b": ""}]
    + ["\0a\x7f", ["\0"]]
)


def spec_of(schema: Any, is_sorted: bool = True, is_control: bool = False) -> Structural:
    return Structural(
        [Trigger("f", Notation(schema, QUOTE, "None", is_sorted), ";")],
        at_least=1,
        free_text=False,
        control_tokens=[(QUOTE, CONTROL)] if is_control else (),
    )


def is_possible(schema: Any) -> bool:
    try:
        compile_in_process(spec_of(schema), VOCABULARY)
    except GrammarError:
        return "e:f" not in schema["required"]
    return True


def read(text: str, quote: str) -> tuple[Any, str]:
    """The value at the beginning of a text, and the rest."""
    if text.startswith(quote):
        value, _, rest = text[len(quote) :].partition(quote)
        return value, rest
    if text[0] in "[{":
        items: list[Any] = []
        rest, end = text[1:], "]" if text[0] == "[" else "}"
        while not rest.startswith(end):
            rest = rest.removeprefix(",") if items else rest
            name, colon, behind = rest.partition(":") if end == "}" else ("", "", rest)
            value, rest = read(behind, quote)
            items.append((name, value) if colon else value)
        return items if end == "]" else dict(items), rest[1:]
    scalar = re.match(r"[^,\]};]+", text)
    assert scalar is not None, text
    literals = {"None": None, "true": True, "false": False}
    value = literals[scalar[0]] if scalar[0] in literals else float(scalar[0])
    return int(value) if isinstance(value, float) and value.is_integer() else value, text[scalar.end() :]


def written(value: Any, is_sorted: bool, quote: str) -> str:
    if isinstance(value, dict):
        names = sorted(value, key=str.lower) if is_sorted else list(value)
        return "{" + ",".join(f"{name}:{written(value[name], is_sorted, quote)}" for name in names) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(one, is_sorted, quote) for one in value) + "]"
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(objects(VALUES | COUNTED), st.booleans(), st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_masks_allow_reads_back(schema: Any, is_sorted: bool, is_control: bool, seed: int) -> None:
    if not is_possible(schema):
        return
    matcher = compile_in_process(spec_of(schema, is_sorted, is_control), VOCABULARY).matcher()
    rng, tokens, likely_bytes = random.Random(seed), list[int](), b"<q>[]{},:;Ba1N"
    for _ in range(rng.randrange(1, 120)):
        allowed = [token for token in allowed_tokens(matcher, VOCABULARY) if token]
        if not allowed:
            break
        likely = [token for token in allowed if token > 256 or token - 1 in likely_bytes]
        tokens.append(rng.choice(likely if likely and rng.random() < 0.85 else allowed))
        assert matcher.accept(tokens[-1])
    completion = matcher.completion(2000)
    assert completion is not None, (schema, tokens)
    spelled = [*VOCABULARY.token_bytes[:CONTROL], SHOWN.encode(), *VOCABULARY.token_bytes[CONTROL + 1 :]]
    text = b"".join(spelled[token] for token in [*tokens, *completion]).decode()
    while text:
        assert text.startswith("f{"), text
        arguments, rest = read(text[1:], SHOWN if is_control else QUOTE)
        assert rest.startswith(";"), (text, rest)
        assert reference_validator(schema).is_valid(arguments), (schema, text, arguments)
        names = [*arguments] if schema["additionalProperties"] is False else []
        assert names == (sorted(names, key=str.lower) if is_sorted else names)
        text = rest[1:]


@given(
    objects(VALUES),
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.sampled_from(["a", "B", "long_name", "c.d", "new"]), ARGUMENTS, max_size=3),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_valid_arguments_are_accepted(
    schema: Any, is_sorted: bool, is_control: bool, arguments: dict[str, Any]
) -> None:
    if not is_possible(schema):
        return
    listed = [*schema["properties"], "new"]
    ordered = sorted(listed[:-1], key=str.lower) + ["new"] if is_sorted else listed  # others stand behind those listed
    others = [name for name in arguments if name not in listed]
    arguments = {name: arguments[name] for name in (*ordered, *others) if name in arguments}
    quote = SHOWN if is_control else QUOTE
    text = "{" + ",".join(f"{name}:{written(value, is_sorted, quote)}" for name, value in arguments.items()) + "}"
    matcher = compile_in_process(spec_of(schema, is_sorted, is_control), VOCABULARY).matcher()
    pieces = f"f{text};".split(SHOWN)
    tokens = [token for piece in pieces for token in (CONTROL, *VOCABULARY.encode(piece))][1:]
    is_accepted = all(map(matcher.accept, tokens)) and matcher.is_accepting
    expected = (is_control or not has_quote(arguments)) and reference_validator(schema).is_valid(arguments)
    assert is_accepted == expected, (schema, text)


def has_quote(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return QUOTE in value if isinstance(value, str) else any(map(has_quote, inner))


def test_a_required_name_that_cannot_stand_bare_is_refused() -> None:
    error = refusal(spec_of({"type": "object", "properties": {"a:b": {}}, "required": ["a:b"]}))
    assert isinstance(error.where, str) and error.where.startswith("/triggers/0/content")
    assert accepts(spec_of({"type": "object", "properties": {"a:b": {}}}), "f{};", "f{a:b:1};") == [True, False]


@pytest.mark.parametrize("schema", [True, {}, {"type": ["object", "string"]}, {"anyOf": [{"type": "object"}, {}]}])
def test_arguments_are_an_object(schema: Any) -> None:
    assert accepts(spec_of(schema), "f{};", "f{a:[<q>x<q>]};", "f1;", "f<q>x<q>;") == [True, True, False, False]


def test_an_item_that_only_repeats_is_not_begun() -> None:
    """The quote of a text is a token that leads to it."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"enum": ["x", 1]}}},
    }
    matcher = compile_in_process(spec_of(schema, is_control=True), VOCABULARY).matcher()
    for token in (*VOCABULARY.encode("f{a:["), CONTROL, 1 + ord("x"), CONTROL, 1 + ord(",")):
        assert matcher.accept(token)
    assert allowed_tokens(matcher, VOCABULARY) == [1 + ord("1")]


def test_counts_choose_members() -> None:
    """Some objects with enough members are left out, and none with too few or too many is written."""
    three = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {}}, "required": ["c"]}
    least, most = spec_of(three | {"minProperties": 2}), spec_of(three | {"maxProperties": 2})
    assert accepts(least, "f{a:1,c:1};", "f{a:1,b:1,c:1};", "f{c:1};") == [True, True, False]
    assert accepts(most, "f{a:1,c:1};", "f{c:1};", "f{a:1,b:1,c:1};", "f{c:1,d:1,e:1};") == [True, True, False, False]


def test_items_are_not_repeated() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    texts = ["[1,1]", "[1,2]", "[<q>x<q>,<q>x<q>]", "[<q>x<q>,<q>y<q>]", "[{a:1,b:2},{b:2,a:1}]", "[<q>,<q>,1]"]
    expected = [False, True, False, True, False, True]
    assert accepts(spec_of(schema), *(f"f{{a:{text}}};" for text in texts)) == expected
