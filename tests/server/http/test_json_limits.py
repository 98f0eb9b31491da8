"""Limits on what a JSON body holds, counted before it is parsed, and work that is done in pieces."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_bodies import parse

from plait.runtime.server.errors import ApiError
from plait.runtime.server.generation.sampling_fields import checked_sampling_params
from plait.runtime.server.http import json_body, json_limits
from plait.runtime.server.http.json_body import parse_steps
from plait.runtime.server.http.json_limits import (
    MAX_CONTAINERS,
    MAX_ELEMENTS,
    MAX_HARD_NUMBERS,
    MAX_LONG_NUMBERS,
    MAX_TEXTS,
    JsonScan,
    scan_steps,
)
from plait.runtime.server.http.response import json_response, json_response_in_pieces

TEXT = st.text(alphabet=st.sampled_from('\\"[{,:a\n'))
VALUES = st.recursive(
    st.integers(0, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def counts(value):
    """(containers, keys, separators, texts) of a decoded value, found one by one."""
    if not isinstance(value, dict | list):
        return 0, 0, 0, int(isinstance(value, str))
    inner = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    num_keys = len(value) if isinstance(value, dict) else 0
    own = 1, num_keys, max(0, len(value) - 1), num_keys
    return tuple(sum(numbers) for numbers in zip(own, *inner, strict=True))


@given(VALUES, st.integers(1, 7))
def test_a_scan_counts_what_is_outside_of_strings_in_pieces_of_any_size(value, piece_bytes):
    scan, body = JsonScan(), json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "PIECE_BYTES", piece_bytes + 1)
        for _ in scan_steps(body, scan):
            pass
    assert (scan.num_containers, scan.num_keys, scan.num_elements, scan.num_quotes / 2) == counts(value)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b"]", f"{MAX_CONTAINERS} arrays and objects"),
        (b"[" + b",".join([b"{}"] * MAX_CONTAINERS) + b"]", f"{MAX_CONTAINERS} arrays and objects"),
        (b"[" * (MAX_CONTAINERS + 1), f"{MAX_CONTAINERS} arrays and objects"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MAX_TEXTS + 1)) + b"}", f"{MAX_TEXTS} texts"),
        (b"[" + b",".join([b"1"] * (MAX_ELEMENTS + 2)) + b"]", f"{MAX_ELEMENTS} elements"),
        (b"[" + b",".join([b'""'] * (MAX_TEXTS + 1)) + b"]", f"{MAX_TEXTS} texts"),
        (b"[" + b",".join([b"9007199254740993.0"] * (MAX_HARD_NUMBERS + 99)) + b"]", f"{MAX_HARD_NUMBERS} number"),
        (b"[" + b",".join([b"1E23"] * (MAX_HARD_NUMBERS + 100)) + b"]", f"{MAX_HARD_NUMBERS} numbers with"),
        (b"[" + b",".join([b"1e-300"] * (MAX_LONG_NUMBERS + 100)) + b"]", f"{MAX_LONG_NUMBERS} numbers of 20 digits"),
        (b"[" + b",".join([b"9" * 20] * (MAX_LONG_NUMBERS + 100)) + b"]", f"{MAX_LONG_NUMBERS} numbers of 20 digits"),
        (b"[" + b",".join([b"1." + b"3" * 19] * (MAX_LONG_NUMBERS + 100)) + b"]", f"{MAX_LONG_NUMBERS} numbers of 20"),
    ],
    ids=["arrays", "objects", "nested", "keys", "numbers", "strings", "halves", "exponents", "large", "long", "places"],
)
def test_a_body_with_too_many_elements_is_refused_before_it_is_parsed(body, limit, monkeypatch):
    monkeypatch.setattr(json_body.msgspec.json, "decode", lambda _: pytest.fail("the body was parsed"))
    with pytest.raises(ApiError, match=limit) as caught:
        parse(body, object)
    assert (caught.value.status, caught.value.code) == (400, "too_many_elements")


def test_the_limits_themselves_are_admitted():
    bodies = (
        b"[" + b",".join([b"[]"] * (MAX_CONTAINERS - 1)) + b"]",
        b"{" + b",".join(b'"%d":1' % i for i in range(MAX_TEXTS)) + b"}",
        b"[" + b",".join([b"1"] * (MAX_ELEMENTS + 1)) + b"]",
        b"[" + b",".join([b"1.5"] * (MAX_ELEMENTS + 1)) + b"]",
        b"[" + b",".join([b"9007199254740993.0"] * MAX_HARD_NUMBERS) + b"]",
        b"[" + b",".join([b"1e-300", b"true"] * MAX_LONG_NUMBERS) + b"]",
        json.dumps(["1.5", "1e-300", "9" * 20] * MAX_HARD_NUMBERS).encode(),  # texts
        json.dumps("[]{},:\"'\\" * MAX_CONTAINERS).encode(),  # a text is not counted
    )
    for body in bodies:
        assert parse(body, object) == json.loads(body)


@given(st.lists(st.floats(-9e13, 9e13).filter(lambda number: number == 0 or abs(number) >= 1e-4), min_size=1))
def test_fractions_as_programs_write_them_are_not_expensive(numbers):
    """They have up to 17 digits behind zeros, and 300 embeddings of 1,500 numbers are within the limits."""
    scan = JsonScan()
    scan.feed(json.dumps(numbers).encode())
    assert (scan.num_hard_numbers, scan.num_long_numbers) == (0, 0)


DIGITS = b"1" * (8 << 20)


@pytest.mark.parametrize(
    "body",
    [
        DIGITS,
        b'{"temperature":' + DIGITS,
        b'"' + b"\\" * len(DIGITS),
        b'"' + rb"\u00e9" * (len(DIGITS) // 6),
        b"[" + b" " * len(DIGITS),
    ],
    ids=["a number", "a cut number", "backslashes", "escapes", "spaces"],
)
def test_a_body_that_is_no_json_costs_little_more_than_its_parsing(body):
    """The longest step, in processor time of this thread; nothing may search the whole body for the reason."""
    begun = time.thread_time()
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(body)
    parsing_s, step_s, steps = time.thread_time() - begun, [], parse_steps(body, [])

    def run_steps():
        while True:
            begun = time.thread_time()
            try:
                next(steps)
            finally:
                step_s.append(time.thread_time() - begun)

    with pytest.raises(ApiError, match="not valid JSON"):
        run_steps()
    assert max(step_s) < 4 * parsing_s + 0.04


def test_a_large_body_is_scanned_and_checked_in_pieces(monkeypatch):
    monkeypatch.setattr(json_limits, "PIECE_BYTES", 1000)
    monkeypatch.setattr(json_body, "CHECKED_PER_STEP", 500)
    body, decoded = b"[" + b",".join([b"1"] * 5000) + b"]", []
    num_steps = sum(1 for _ in parse_steps(body, decoded))
    assert num_steps == 11 + 1 + 10 + 1  # 10,001 bytes are scanned, parsed, 5,000 values checked; then it is converted
    assert decoded == [[1] * 5000]


def test_an_integer_beyond_64_bits_is_found_in_every_piece(monkeypatch):
    monkeypatch.setattr(json_body, "CHECKED_PER_STEP", 3)
    for index in range(8):
        numbers = [1] * 8
        numbers[index] = 2**63
        with pytest.raises(ApiError, match="64 bits"):
            parse(json.dumps(numbers).encode(), object)


def test_too_many_logit_biases_are_refused_before_their_keys_are_read():
    with pytest.raises(ApiError, match="'logit_bias' takes at most 1024 token ids, not 1025") as caught:
        checked_sampling_params("openai", logit_bias={f"not an id {i}": 1.0 for i in range(1025)})
    assert caught.value.param == "logit_bias"


class Item(msgspec.Struct, omit_defaults=True):
    text: str
    index: int = 0


class Answer(msgspec.Struct):
    name: str
    items: list[Item]
    numbers: list[int]
    unset: int | msgspec.UnsetType = msgspec.UNSET


def test_an_answer_in_pieces_equals_the_answer_encoded_at_once(monkeypatch):
    num_yields = 0
    sleep = asyncio.sleep

    async def counting_sleep(seconds):
        nonlocal num_yields
        num_yields += 1
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", counting_sleep)
    items = [Item("x" * (1 << 17), index) for index in range(9)]
    for value in (items, Answer("a", items, [1, 2]), Answer("a", [], []), {"a": 1}, [], [1, 2]):
        assert asyncio.run(json_response_in_pieces(value)).body == json_response(value).body
    assert num_yields == 2 * 4  # 9 items of 128 KiB, a pause after 256 KiB
