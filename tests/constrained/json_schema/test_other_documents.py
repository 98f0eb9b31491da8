"""References to documents that the caller gives: a value is accepted exactly if it is valid by jsonschema-rs."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY, accepts, compact, grammar_of

from plait.constrained import GrammarError, JsonSchema

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
AT = "https://a.b/dir"
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"items": {"$ref": "x:y"}}, {"x:y": INTEGER}),
    ({"items": {"$ref": "x:y#/$defs/n"}}, {"x:y": {"$defs": {"n": INTEGER}}}),
    ({"items": {"$ref": "x:y#/odd/n"}}, {"x:y": {"odd": {"n": {"$ref": "x:z"}}}, "x:z": INTEGER}),
    ({"items": {"$ref": "x:y#n"}}, {"x:y": {"$defs": {"m": {"$anchor": "n", **INTEGER}}}}),
    ({"items": {"$ref": f"{AT}/c"}}, {f"{AT}/c": {"$ref": "d"}, f"{AT}/d": INTEGER, f"{AT}/e": {"type": "nothing"}}),
    ({"$id": f"{AT}/r", "items": {"$ref": "c"}}, {"c": INTEGER}),
    ({"items": {"$ref": f"{AT}/q"}}, {"x:y": {"$id": f"{AT}/q", **INTEGER}}),
    ({"type": ["array", "integer"], "items": {"$ref": "x:y"}}, {"x:y": {"type": ["array", "integer"], "maxItems": 1}}),
    ({"$id": f"{AT}/r", "items": {"$ref": "c"}}, {f"{AT}/c": {"type": "array", "items": {"$ref": "r"}}}),
    (
        {"$schema": DRAFT_7, "items": {"$ref": f"{AT}/c"}},
        {f"{AT}/c": {"definitions": {"n": INTEGER}, "$ref": "#/definitions/n"}},
    ),
    ({"$schema": DRAFT_7, "items": {"$ref": "x:y"}}, {"x:y": {"$schema": DRAFT_7, "$id": "x:q", **INTEGER}}),
    (
        {"$schema": DRAFT_7, "items": {"$ref": f"{AT}/c#/definitions/n"}},
        {f"{AT}/c": {"$schema": DRAFT_4, "definitions": {"n": {"minimum": 1, "exclusiveMinimum": True}}}},
    ),
    (
        {"items": {"$ref": "x:y"}},
        {
            "x:y": {"$schema": DRAFT_7, "items": [INTEGER, {"$ref": f"{AT}/d"}]},
            f"{AT}/d": {"$schema": DRAFT_4, "id": f"{AT}/d", **TEXT},
        },
    ),
    (
        {"$id": "x:r", "$dynamicAnchor": "n", "$ref": "x:list", "type": ["array", "integer"]},
        {"x:list": {"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}},
    ),
    ({"items": {"$ref": "x:y"}}, {"x:y": False}),
]  # fmt: skip
VALUES = [[], [1], [3], [0], ["a"], [[1]], [[3], 3], [[["a"]]], [[1, "a"]], [["a", 1]], [1.5], 1, "a", None]


def validator_of(schema: Any, schemas: dict[str, Any]) -> Any:
    uri = schema.get("$id", "") if isinstance(schema, dict) else ""
    absolute = {name if ":" in name else uri.rpartition("/")[0] + "/" + name: inner for name, inner in schemas.items()}
    registry = jsonschema_rs.Registry([(uri, schema), *absolute.items()] if uri else list(absolute.items()))
    return jsonschema_rs.validator_for(schema, registry=registry, validate_formats=True)


@pytest.mark.parametrize("at", range(len(CASES)))
def test_a_value_is_accepted_exactly_if_it_is_valid(at: int) -> None:
    schema, schemas = CASES[at]
    schemas = {name: inner for name, inner in schemas.items() if inner != {"type": "nothing"}}
    grammar, validator = grammar_of(schema, schemas=CASES[at][1]), validator_of(schema, schemas)
    valid = [value for value in VALUES if validator.is_valid(value)]
    assert [value for value in VALUES if accepts(grammar, compact(value))] == valid
    assert 0 < len(valid) < len(VALUES)


URIS = ["https://a.b/r", "https://a.b/d/x", "https://a.b/d/y", "https://a.b/z"]
REFERENCES = st.sampled_from(
    ["#", "/d/x", "/d/y", "z", "../z", *URIS, "#/$defs/n", "/d/y#/$defs/n", "/d/x#n", "https://a.b/d/y#n", "#n"]
)
PARTS = st.one_of(
    REFERENCES.map(lambda uri: {"$ref": uri}), st.sampled_from([INTEGER, TEXT, {"type": "array"}, {"maxItems": 1}])
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from([["array", "integer"], ["array", "string"]]),
        "items": PARTS,
        "$defs": PARTS.map(lambda part: {"n": {"$anchor": "n", "type": ["integer", "array"], "items": part}}),
    },
    optional={"prefixItems": st.lists(PARTS, min_size=1, max_size=1)},
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(root=DOCUMENTS, others=st.lists(DOCUMENTS, min_size=3, max_size=3))
def test_references_between_documents_lead_where_the_validator_finds_them(root: Any, others: list[Any]) -> None:
    schema, schemas = {**root, "$id": URIS[0]}, dict(zip(URIS[1:], others, strict=True))
    try:
        validator = validator_of(schema, schemas)
    except (ValueError, jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError):
        reject()  # it resolves references that no value leads to as well
    try:
        grammar = grammar_of(schema, schemas=schemas)
    except GrammarError as error:
        if "nothing" not in error.reason and "itself" not in error.reason:
            raise
        reject()
    for value in VALUES:
        assert accepts(grammar, compact(value)) is validator.is_valid(value), value


def test_the_id_of_a_document_is_the_base_of_its_references() -> None:
    schemas = {f"{AT}/y": {"$id": f"{AT}/q/", "$ref": "z"}, f"{AT}/q/z": INTEGER, f"{AT}/z": TEXT}
    for uri in (f"{AT}/y", f"{AT}/q/"):
        grammar = grammar_of({"$ref": uri}, schemas=schemas)
        assert accepts(grammar, "1") and not accepts(grammar, '"a"')


def test_an_error_names_the_document_and_the_place() -> None:
    with pytest.raises(GrammarError, match="nothing is fetched") as caught:
        grammar_of({"items": {"$ref": "x:y"}}, schemas={"x:y": {"items": {"$ref": "x:z"}}})
    assert caught.value.where == "/$defs/x:y/items/$ref"


def test_what_is_not_referred_to_is_not_read() -> None:
    grammar_of({"type": "null"}, schemas={"x:y": {"$schema": "x:unknown", "minLenght": 3}})
    with pytest.raises(GrammarError, match="minLength"):
        grammar_of({"items": {"$ref": "x:y"}}, schemas={"x:y": {"minLenght": 3}})


@pytest.mark.parametrize(
    ("schemas", "reason"),
    [
        ({"x:y": {"title": "a" * (1 << 20)}}, "longer than 1048576 bytes"),
        ({"x:y": {"title": "a" * (1 << 19)}, "x:z": {"title": "a" * (1 << 19)}}, "1048576 bytes together"),
        ({f"x:{i}": True for i in range(1025)}, "more than 1024"),
        ({3: True}, "which are texts"),
        (["x:y"], "must be a text"),
        ({"x:y": 3}, "a schema is"),
    ],
)
def test_what_is_too_large_or_of_another_type_is_refused(schemas: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        JsonSchema(True, schemas=schemas)


def test_a_text_of_schemas_that_is_no_map_is_refused() -> None:
    for text in ("[1]", "{", '{"x:y": 3}'):
        with pytest.raises(GrammarError):
            grammar_of({"$ref": "x:y"}, schemas=text)


def test_workers_and_full_validation_have_the_documents() -> None:
    schemas = {"x:y": {"not": {"items": {"$ref": "#/$defs/n"}, "uniqueItems": True}, "$defs": {"n": INTEGER}}}
    spec = JsonSchema({"type": "array", "$ref": "x:y"}, lenient=True, schemas=schemas)
    grammar = compile_in_process(spec, BYTE_VOCABULARY)
    assert grammar.unchecked == ("/$defs/x:y/not",)
    assert grammar.check("[2,2]") is None and grammar.check("[1,2]")
