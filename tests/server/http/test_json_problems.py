"""What the error for a body that is no JSON says."""

from __future__ import annotations

import pytest
from json_bodies import parse

from plait.runtime.server.errors import ApiError


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"a": "\\ud800"}', "a text holds half of a surrogate pair, which is not a character"),
        (b'{"a": "\\uDBFFx"}', "a text holds half of a surrogate pair, which is not a character"),
        (b'{"a": "\\ud83d\\ude00"', "truncated"),
        (b'{"a": 1', "truncated"),
        (b'{"a": "\\\\ud800"', "truncated"),  # a backslash and five letters
        (b"{a: 1}", "the body is not valid JSON: "),
    ],
)
def test_the_error_says_what_is_wrong(body, text):
    with pytest.raises(ApiError, match=text) as caught:
        parse(body, dict[str, str])
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_surrogate_pair_is_a_character():
    assert parse(b'{"a": "\\ud83d\\ude00"}', dict[str, str]) == {"a": "\U0001f600"}
