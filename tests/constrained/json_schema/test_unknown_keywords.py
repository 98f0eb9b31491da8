"""Names that are no keywords: annotations, unless a person probably meant a keyword."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_strategies import accepts, grammar_of

from plait.constrained import GrammarError
from plait.constrained.json_schema.rewrite.keywords import ANNOTATIONS, ASSERTIONS, misspelt_keyword

TYPOS = {
    **{"propertys": "properties", "property": "properties", "proprties": "properties", "Properties": "properties"},
    **{"itmes": "items", "item": "items", "typ": "type", "tpye": "type", "types": "type", "ref": "$ref"},
    **{"max_items": "maxItems", "min_length": "minLength", "minlength": "minLength", "minLenght": "minLength"},
    **{"requred": "required", "requierd": "required", "require": "required", "any_of": "anyOf", "anyof": "anyOf"},
    **{"additionalproperties": "additionalProperties", "additional_properties": "additionalProperties"},
    **{"additionalPropertys": "additionalProperties", "patern": "pattern", "formats": "format", "enums": "enum"},
    **{"exclusive-minimum": "exclusiveMinimum", "multipleof": "multipleOf", "uniqueItem": "uniqueItems"},
    **{"patternPropertys": "patternProperties", "dependantRequired": "dependentRequired", "cosnt": "const"},
}
OTHER_WORDS = [
    *(
        "_format",
        "_uniqueItems",
        "x-type",
        "x-items",
        "$typ",
        "@type",
        "@ref",
        "__requred",
        "cost",
        "when",
        "note",
        "ten",
    ),
    *(
        "order",
        "displayOrder",
        "label",
        "help",
        "hint",
        "units",
        "minimal",
        "options",
        "group",
        "widget",
        "placeholder",
    ),
    *("name", "value", "key", "version", "tags", "source", "since", "author", "optional", "propertyOrder", "markdown"),
    *("enumNames", "enumDescriptions", "errorMessage", "deprecationMessage", "markdownDescription", "defaultSnippets"),
    *("tsType", "javaType", "example", "xml", "discriminator", "externalDocs", "requiredMessage", "links", "unit"),
]


@pytest.mark.parametrize(("name", "keyword"), TYPOS.items())
def test_a_probable_misspelling_is_refused_and_names_the_keyword(name, keyword) -> None:
    with pytest.raises(GrammarError, match=f"perhaps {keyword.replace('$', '.')} is meant"):
        grammar_of({"type": "object", "properties": {"a": {"type": "string", name: 1}}})


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_other_names_are_annotations(name) -> None:
    assert accepts(grammar_of({"type": "integer", name: {"type": 3}}), "1")


@given(st.sampled_from(sorted(ASSERTIONS)), st.sampled_from(["_", "x-", "$", "@", "__"]))
def test_a_mark_before_a_keyword_makes_it_an_annotation(keyword, mark) -> None:
    assert misspelt_keyword(mark + keyword.removeprefix("$"), ASSERTIONS) is None


@given(st.sampled_from(sorted(keyword for keyword in ASSERTIONS if len(keyword) > 5)), st.data())
def test_two_swapped_letters_are_found(keyword, data) -> None:
    place = data.draw(st.integers(1, len(keyword) - 2))
    typo = keyword[:place] + keyword[place + 1] + keyword[place] + keyword[place + 2 :]
    assert typo in ASSERTIONS or misspelt_keyword(typo, ASSERTIONS) in ASSERTIONS


def test_no_annotation_keyword_counts_as_a_misspelling() -> None:
    assert {name: misspelt_keyword(name, ASSERTIONS) for name in ANNOTATIONS} == dict.fromkeys(ANNOTATIONS)


def test_a_probable_misspelling_that_counts_as_an_annotation_is_a_warning() -> None:
    schema = {"type": "object", "propertys": {}, "x-note": 1, "nullable": True, "additionalProperties": {"Type": "a"}}
    grammar = grammar_of(schema, annotations=True)
    assert accepts(grammar, '{"a":1}') and sorted(grammar.warnings) == [
        "/additionalProperties/Type has no effect: not a keyword; perhaps type is meant",
        "/nullable has no effect: nullable is OpenAPI's; write the type as a list with null in it",
        "/propertys has no effect: not a keyword; perhaps properties is meant",
    ]
    assert grammar_of({"x-note": 1, "extra": {"required": 1}}, annotations=True).warnings == ()
