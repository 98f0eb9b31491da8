"""The strict JSON parser of request bodies, without a server."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_bodies import parse

from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.json_body import MAX_DEPTH

TEXT = st.text(alphabet=st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    items: list[Inner]


@given(VALUES, st.booleans())
def test_valid_json_is_parsed_like_the_json_module(value, ascii_only) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse(body, object) == json.loads(body)


@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), st.data())
def test_duplicate_keys_are_refused_at_any_depth(value, data) -> None:
    duplicate = data.draw(st.sampled_from(sorted(value)))
    pairs = [f"{json.dumps(key)}:{json.dumps(item)}" for key, item in value.items()]
    body = "{" + ",".join([*pairs, f"{json.dumps(duplicate)} : 1"]) + "}"
    for document in (body, f"[{body}]", f'{{"x":[1,{{"y":{body}}}]}}'):
        with pytest.raises(ApiError, match="duplicate"):
            parse(document.encode(), object)


@pytest.mark.parametrize("body", [rb'{"a\\":1,"b\"":"\":","c" :":x","\\\"":{"":[":","\\"]}}', b'[":",":"]'])
def test_quotes_and_colons_within_strings_are_not_counted_as_keys(body) -> None:
    assert parse(body, object) == json.loads(body)


def test_nesting_is_limited() -> None:
    assert parse(b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1), object)
    with pytest.raises(ApiError, match="nested"):
        parse(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), object)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "items"),
        (b'{"items":[{"a":1},{}]}', "items[1].a"),
        (b'{"items":[{"a":1,"b":2}]}', "items[0].b"),
        (b'{"items":[{"a":"1"}]}', "items[0].a"),
        (b"[]", None),
    ],
)
def test_errors_name_the_path(body, param) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, Outer)
    assert caught.value.param == param and caught.value.status == 400
