"""Every type that Pydantic's documentation lists: each generated text is read back, or `gen` refuses the type."""

from __future__ import annotations

import contextlib
import json
import re

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_types import ALL_TYPES
from schema_values import texts_of

import plait
from plait import gen
from plait.lang.typed.value_format import value_format_of
from plait.runtime.client.constraint_check import constraint_error

REFUSED = {
    *("bytes", "bytearray", "set", "frozenset", "type", "type[int]", "Callable", "Hashable", "Pattern", "Strict("),
    *("PathType", "Encoded", "Json", "PastDate", "FutureDate", "ImportString", "EmailStr", "NameEmail"),
    *("Ge(ge=datetime.timedelta", "gt=datetime.date", "min_length=2, max_length=None", "min_length=0, max_length=3"),
}


def fields(type_: object) -> type[pydantic.BaseModel]:
    return pydantic.create_model("Fields", one=(type_, ...), many=(list[type_], []))


FORMATS = {}  # of the types that are admitted, and of models with a field of them
for number, candidate in enumerate(ALL_TYPES):
    with contextlib.suppress(plait.InputError):
        FORMATS[number] = (value_format_of("gen", candidate), value_format_of("gen", fields(candidate)))
TEXTS = [(value_format, texts_of(value_format.spec)) for pair in FORMATS.values() for value_format in pair]
REFUSED_TYPES = [type_ for number, type_ in enumerate(ALL_TYPES) if number not in FORMATS]


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(TEXTS), st.data())
def test_what_is_admitted_is_read_back(admitted, data):
    value_format, texts = admitted
    value_format.read(data.draw(texts))


def test_a_type_that_is_refused_is_listed_here():
    assert [str(type_) for type_ in REFUSED_TYPES if not any(part in str(type_) for part in REFUSED)] == []


@pytest.mark.parametrize("type_", REFUSED_TYPES, ids=str)
def test_what_cannot_be_held_is_refused_where_gen_is_written(type_):
    for refused in (type_, list[type_]):
        with pytest.raises(plait.InputError, match=r"cannot be generated: .{20}"):
            gen("x", type=refused)


@pytest.mark.parametrize(
    "type_",
    [pydantic.HttpUrl, set[int], pydantic.IPvAnyNetwork, pydantic.condecimal(max_digits=5), pydantic.UUID4],
    ids=str,
)
def test_the_constraints_compile(type_):
    assert constraint_error(value_format_of("gen", fields(type_)).spec) is None


@pytest.mark.parametrize(
    ("type_", "text", "other"),
    [
        (pydantic.UUID4, "0f0e0d0c-1b1a-4989-8786-858483828180", "0f0e0d0c-1b1a-1989-8786-858483828180"),
        (pydantic.HttpUrl, "https://example.org/a?b=c#d", "ftp://example.org"),
        (pydantic.NaiveDatetime, "2024-02-29T10:00:00", "2024-02-29T10:00:00Z"),
        (pydantic.IPvAnyNetwork, "10.1.0.0/16", "10.1.2.0/16"),
        (pydantic.condecimal(max_digits=4, decimal_places=2), "99.25", "100.25"),
        (complex, "1.5-2j", "1.5"),
    ],
    ids=str,
)
def test_usual_texts_are_allowed(type_, text, other):
    spec = value_format_of("gen", fields(type_)).spec
    pattern = re.compile(json.loads(spec.text)["properties"]["one"]["pattern"])
    assert pattern.search(text) and not pattern.search(other)
