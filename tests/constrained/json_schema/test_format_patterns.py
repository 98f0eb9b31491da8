"""Formats as patterns: what a pattern allows is valid for jsonschema-rs, and regexes for Python too."""

from __future__ import annotations

import re
import warnings

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained.json_schema.rewrite.formats import FORMATS
from plait.constrained.json_schema.rewrite.patterns import ecma_to_plain_pattern

PATTERNS = {name: re.compile(ecma_to_plain_pattern(f"^(?:{pattern})$").pattern) for name, pattern in FORMATS.items()}
VALIDATORS = {
    name: jsonschema_rs.Draft202012Validator({"type": "string", "format": name}, validate_formats=True)
    for name in FORMATS
}
EXAMPLES = {
    "regex": r"^\d{3}-\d{2,4}$ (a|b(?:c)*)+? [^\]x-] [\w.-]+@x ^(?:[0-9]{1,3}\.){3}[0-9]{1,3}$ ^[A-Za-z_]\w*$ a{1,}"
    r" ^(?=.*\d)(?!.*[_])\w{8,}$ (?<!a)b(?<=[bc]x) (?:a(?=b|c))*",
    "uri-template": "/{a} http://x.org/{+p}{?b*,c:3}{&d} {#x,hello} {/var:1,var} %20 {;x,y} {a.b} {%41}",
    "iri": "https://a.org/é?ü#ö http://a.org:80/ urn:x:y",
    "iri-reference": "/é a/b#ü //x.org/a ? #",
    "uri-reference": "../a?x #f ?q /a//b a;b=c",
    "idn-email": "jörg@b.org a.b@c.d",
    "idn-hostname": "müller.de straße.example 例え.テスト 실례.com пример.org a-b.c",
}


@pytest.mark.parametrize(
    "name", ["regex", "uri-template", "iri", "iri-reference", "uri-reference", "idn-email", "idn-hostname"]
)
def test_what_a_pattern_allows_is_valid(name) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.from_regex(PATTERNS[name], fullmatch=True))
    def check(text: str) -> None:
        assert VALIDATORS[name].is_valid(text), text
        if name == "regex":
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                re.compile(text)

    check()


@pytest.mark.parametrize(("name", "texts"), EXAMPLES.items())
def test_common_texts_are_allowed(name, texts) -> None:
    for text in (*texts.split(), *([] if name in ("iri", "idn-email", "idn-hostname") else [""])):
        assert PATTERNS[name].fullmatch(text), text
        assert VALIDATORS[name].is_valid(text), text


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='aZ09é{}()[]*+?|\\^$.,:;/#%&=@~<>" -', max_size=8))
def test_texts_that_are_not_valid_are_not_allowed(name, text) -> None:
    if PATTERNS[name].fullmatch(text):
        assert VALIDATORS[name].is_valid(text), text
