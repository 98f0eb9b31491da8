"""API keys: reading them from a file, and finding the name of a client's key."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.errors import InputError
from plait.runtime.server.http.api_keys import digest, find_key_name, read_keys

KEYS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@given(st.lists(KEYS, min_size=1, max_size=5, unique=True), st.data())
def test_known_keys_have_their_name_and_others_none(keys, data) -> None:
    known = {f"k{index}": hashlib.sha256(key.encode()).hexdigest() for index, key in enumerate(keys)}
    for index, key in enumerate(keys):
        assert find_key_name(key.encode(), known) == f"k{index}"
    other = data.draw(KEYS.filter(lambda key: key not in keys))
    assert find_key_name(other.encode(), known) is None
    assert find_key_name(b"", known) is None


def test_file_has_keys_and_digests(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\nalice  one\n\nbob\tsha256:{digest(b'two')}\n")
    keys = read_keys("three", str(file))
    assert {find_key_name(key, keys) for key in (b"one", b"two", b"three")} == {"alice", "bob", "default"}
    assert "one" not in str(keys) and "three" not in str(keys)
    assert read_keys(None, None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "line 1"),
        ("a key more", "line 1"),
        ("# x\nal/ice secret", "line 2"),
        ("a one\na two", "line 2"),
        ("default x", "line 1"),
        ("\n", "no API key"),
    ],
)
def test_errors_in_a_file_name_the_line_but_never_the_key(tmp_path, text, message) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_keys("given", str(file))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["", " ", "two words", "ü", "x" * 513])
def test_key_must_fit_into_a_header(key) -> None:
    with pytest.raises(InputError):
        read_keys(key, None)
