"""Elements: what the masks allow reads back as valid arguments, and valid arguments as a template writes them pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
from byte_grammars import accepts, refusal
from call_texts import read_elements, write_elements
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matchers import allowed_tokens, compile_in_process
from schema_strategies import BYTE_VOCABULARY, EOS_ID, reference_validator

from plait.constrained import GrammarError, Structural
from plait.constrained.specs import Elements, Trigger

FORMS = [
    ("<p={name}>\n", "\n</p>\n", "", "</f>"),
    ("<p={name}>\n", "\n</p>", "\n", "\n</f>"),
    ("<k>{name}</k>\n<v>", "</v>", "\n", "\n</f>"),
    ("<p={name}>", "aa", "", "</f>"),  # a close that can overlap with itself
]
SCALARS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "a</p>", "null", "3", 3, None, True]},
        {"enum": ["x", "y z"]},
        {"type": "string", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]+$"},
        {"type": ["string", "null"]},
        {"type": ["string", "integer", "boolean"]},
        {"type": ["string", "array"]},
        {"type": ["string", "number"], "not": {"type": "integer"}},
        {"type": "number", "not": {"type": "integer"}, "maximum": 3},
        {"enum": ["red", 2.5, 3], "not": {"type": "integer"}},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "maximum": 5}, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"a": {"type": "integer"}}}]},
        {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 3},
        {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
        {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False},
        {},
    ]
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "long_name", "c.d", "e>"]), SCALARS, max_size=4).flatmap(
    lambda properties: st.builds(
        lambda required, is_open: {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": is_open,
        },
        st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
        st.booleans(),
    )
)
VALUES = st.one_of(
    st.sampled_from(
        ["", "a", "red", "x", "null", "3", "2.5", "[", "a\nb", '"q"', "</p", "a</p>", "aa", " ", "true", "é<", "\n"]
    ),
    st.none(),
    st.booleans(),
    st.integers(-2, 30),
    st.sampled_from([[], [1], ["a"], [1, 1], {}, {"a": 1}, {"b": True}, 2.5]),
)


def spec_of(schema: Any, form: tuple[str, str, str, str]) -> Structural:
    open_, close, separator, end = form
    return Structural([Trigger("<f>\n", Elements(schema, open_, close, separator), end)], at_least=1, free_text=False)


def is_possible(spec: Structural) -> bool:
    """Whether the schema has a form: a name that the mark cannot hold is refused if it is required."""
    try:
        compile_in_process(spec, BYTE_VOCABULARY)
    except GrammarError as error:
        return not ("required" in error.reason or "no text" in error.reason)
    return True


@given(OBJECTS, st.sampled_from(FORMS), st.integers(0, 1 << 30))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_masks_allow_reads_back(schema: Any, form: tuple[str, str, str, str], seed: int) -> None:
    spec = spec_of(schema, form)
    if not is_possible(spec):
        return
    rng, matcher, tokens = random.Random(seed), compile_in_process(spec, BYTE_VOCABULARY).matcher(), list[int]()
    for _ in range(rng.randrange(1, 150)):
        allowed = [token for token in allowed_tokens(matcher, BYTE_VOCABULARY) if token != EOS_ID]
        if not allowed:
            break
        likely = [token for token in allowed if bytes([token - 1]) in b'<>/pvkf=\n"a1']
        tokens.append(rng.choice(likely if likely and rng.random() < 0.8 else allowed))
        assert matcher.accept(tokens[-1])
    completion = matcher.completion(2000)
    assert completion is not None, (schema, form, bytes(token - 1 for token in tokens))
    text = bytes(token - 1 for token in [*tokens, *completion]).decode()
    while text:
        assert text.startswith("<f>\n"), text
        arguments, rest = read_elements(text[4:], schema["properties"], *form[:3])
        assert rest.startswith(form[3]), (text, rest)
        assert reference_validator(schema).is_valid(arguments), (schema, text, arguments)
        text = rest.removeprefix(form[3])


@given(
    OBJECTS,
    st.sampled_from(FORMS),
    st.dictionaries(st.sampled_from(["a", "b", "long_name", "c.d", "new"]), VALUES, max_size=4),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_valid_arguments_are_accepted(schema: Any, form: tuple[str, str, str, str], arguments: dict[str, Any]) -> None:
    order = [*schema["properties"], "new"]
    arguments = {name: arguments[name] for name in order if name in arguments}
    spec = spec_of(schema, form)
    if not is_possible(spec):
        return
    text = write_elements(arguments, *form[:3])
    (is_accepted,) = accepts(spec, f"<f>\n{text}{form[3]}")
    read, rest = read_elements(text, schema["properties"], *form[:3])
    reads_back = not rest and write_elements(read, *form[:3]) == text
    assert is_accepted == (reads_back and reference_validator(schema).is_valid(read)), (schema, text, read)


def test_counts_choose_members() -> None:
    three = {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {}}
    spec = spec_of({"type": "object", "properties": three, "minProperties": 1, "maxProperties": 1}, FORMS[0])
    texts = ["<f>\n<p=a>\n1\n</p>\n</f>", "<f>\n<p=a>\n1\n</p>\n<p=b>\nnull\n</p>\n</f>"]
    assert accepts(spec, *texts) == [True, False]


def test_a_name_with_a_control_token_is_text() -> None:
    spec = Structural(
        [Trigger("<f>", Elements({"properties": {"<x>": {}}}, "<p={name}>", "</p>"), "</f>")],
        control_tokens=[("<x>", EOS_ID)],
    )
    assert refusal(spec).reason == "token 0 is not a control token"


@pytest.mark.parametrize("open_", ["<p>", "{name}", "<p={name}", "{name}{name}>"])
def test_open_has_the_name_once_and_a_text_behind_it(open_: str) -> None:
    with pytest.raises(GrammarError, match="open must have"):
        Elements({}, open_, "</p>")


def test_listed_values_of_a_type_stand_behind_the_text_of_that_type() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 1, 2.5, None]}}, "additionalProperties": False}
    types = (("string", "text"), ("integer", "number"), ("number", "number"), ("null", "null"))
    content = Elements(schema, "<p={name} {type}>", "</p>", types=types)
    spec = Structural([Trigger("<f>", content, "</f>")], at_least=1, free_text=False)
    good = ["text>x", "number>1", "number>2.5", "null>null"]
    bad = ["text>1", "text>null", "number>x", "number>null", "null>x"]
    assert accepts(spec, *(f"<f><p=a {text}</p></f>" for text in good)) == [True] * len(good)
    assert accepts(spec, *(f"<f><p=a {text}</p></f>" for text in bad)) == [False] * len(bad)


@pytest.mark.parametrize("python", ["", "scalars", "values"])
def test_literals_are_spelled_as_json_or_as_python(python: Any) -> None:
    kinds = {"a": ["boolean", "null"], "b": ["string", "boolean"], "c": ["array"], "d": ["integer", "null"]}
    properties: dict[str, Any] = {name: {"type": types} for name, types in kinds.items()}
    properties["d"] |= {"multipleOf": 5}
    content = Elements({"type": "object", "properties": properties}, "<{name}>", "</p>", python=python)
    spec = Structural([Trigger("<f>", content, "</f>")], at_least=1, free_text=False)
    scalars, containers = bool(python), python == "values"
    for text, expected in (
        ("<a>true", not scalars),
        ("<a>null", not scalars),
        ("<a>True", scalars),
        ("<a>None", scalars),
        ("<b>True", True),
        ("<b>true", True),
        ("<c>[true, null]", not containers),
        ('<c>[True, {"a": None}]', containers),
        ("<d>10", True),
        ("<d>11", False),
        ("<d>None", scalars),
    ):
        assert accepts(spec, f"<f>{text}</p></f>") == [expected], text


def test_python_is_one_of_a_few_forms() -> None:
    with pytest.raises(GrammarError, match="python must be one of"):
        Elements({}, "<{name}>", "</p>", python="all")  # type: ignore[arg-type]
