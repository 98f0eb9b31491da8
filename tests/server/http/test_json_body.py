"""The body's own rules, without a server."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.json_body import MAX_DEPTH, parse

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
def test_what_is_valid_is_read_as_json_reads_it(value, ascii_only) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse(body, object) == json.loads(body)


@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), st.data())
def test_a_key_given_twice_is_refused_wherever_it_stands(value, data) -> None:
    twice = data.draw(st.sampled_from(sorted(value)))
    pairs = [f"{json.dumps(key)}:{json.dumps(item)}" for key, item in value.items()]
    body = "{" + ",".join([*pairs, f"{json.dumps(twice)} : 1"]) + "}"
    for whole in (body, f"[{body}]", f'{{"x":[1,{{"y":{body}}}]}}'):
        with pytest.raises(ApiError, match="duplicate"):
            parse(whole.encode(), object)


@pytest.mark.parametrize("body", [rb'{"a\\":1,"b\"":"\":","c" :":x","\\\"":{"":[":","\\"]}}', b'[":",":"]'])
def test_quotes_and_colons_that_are_no_keys(body) -> None:
    assert parse(body, object) == json.loads(body)


def test_depth() -> None:
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
def test_the_place_is_named(body, param) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, Outer)
    assert caught.value.param == param and caught.value.status == 400
