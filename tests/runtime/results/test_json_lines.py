"""Lines of an input: found in whatever pieces they come, read strictly, each one by itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.runtime.results.json_lines import LineSplitter, parse_json_line


@given(st.lists(st.binary(max_size=6)), st.integers(1, 8))
def test_lines_do_not_depend_on_the_pieces(pieces, max_bytes) -> None:
    splitter = LineSplitter(max_bytes)
    found = [line for piece in pieces for line in splitter.feed(piece)] + list(splitter.end())
    data, offset, expected = b"".join(pieces), 0, []
    *lines, last = data.split(b"\n")
    for number, line in enumerate([*lines, *([last] if last else [])], 1):
        expected.append((number, offset, line if len(line) <= max_bytes else None))
        offset += len(line) + 1
    assert found == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": "\xff"}', "byte 8 is not UTF-8"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": -1e999}', "-1e999 is beyond"),
        (b"[" * 100_000, "nested too deep"),
        (b"9" * 5000, "Exceeds the limit"),
        (b"{broken", "property name"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_what_is_not_json_has_a_reason(line, reason) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        parse_json_line(line)
    assert "\n" not in str(refused.value)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
def test_json_is_read_as_it_was(value) -> None:
    assert parse_json_line(json.dumps(value).encode()) == value
