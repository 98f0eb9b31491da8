"""Random nested types and texts: values fit the schema of their type and are read back."""

from __future__ import annotations

import datetime
import json
import re
import uuid

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st
from random_types import NESTED

from plait.lang.typed import patterns
from plait.lang.typed.value_format import value_format_of


@settings(max_examples=150, deadline=None)
@given(NESTED, st.data())
def test_values_of_nested_types_fit_the_schema_and_are_read_back(nested, data):
    type_, values = nested
    value, written = data.draw(values)
    value_format = value_format_of("gen", list[type_])
    text = json.dumps([written])
    jsonschema.Draft202012Validator(json.loads(value_format.spec.text)).validate([written])
    (read,) = value_format.read(text)
    assert read == value and type(read) is type(value)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([int, float, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID]),
       st.data())  # fmt: skip
def test_text_that_matches_the_pattern_of_a_type_can_be_read(type_, data):
    value_format = value_format_of("gen", type_)
    text = data.draw(st.from_regex(re.compile(value_format.spec.pattern, re.ASCII), fullmatch=True))
    assert type(value_format.read(text)) is type_


@settings(max_examples=200, deadline=None)
@given(st.dates(min_value=datetime.date(1000, 1, 1)))
def test_dates_from_the_year_1000_match_the_pattern(day):
    assert re.fullmatch(patterns.DATE, day.isoformat())
