"""Patterns of numbers between two bounds and of multiples, against exact arithmetic on texts and their neighbours."""

from __future__ import annotations

import itertools
import math
import random
import re
from bisect import bisect_left
from decimal import Decimal
from fractions import Fraction
from functools import cache
from operator import itemgetter

import pytest
from example_share import share_of
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.constrained.json_schema.number_patterns import decimals_between, fractions, integers_between, multiples_of
from plait.constrained.json_schema.rewrite.numbers import NumberRange, decimal_of, number_range

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
MAX_LENGTH = 5


@cache
def texts() -> list[tuple[int, str]]:
    """All numbers of up to MAX_LENGTH characters without an exponent, with their values in thousandths, by value."""
    fractions = [
        "",
        *("." + "".join(d) for n in range(1, MAX_LENGTH - 1) for d in itertools.product("0123456789", repeat=n)),
    ]
    found = []
    for whole in map(str, range(10**MAX_LENGTH)):
        for text in itertools.takewhile(
            lambda text: len(text) <= MAX_LENGTH, (whole + fraction for fraction in fractions)
        ):
            found += [text] + ["-" + text] * (len(text) < MAX_LENGTH)
    return sorted((int(Decimal(text).scaleb(MAX_LENGTH - 2)), text) for text in found)


UNIT = 10 ** (MAX_LENGTH - 2)
BOUNDS = [None, *(Decimal(hundredths) / 100 for hundredths in range(-999, 1000))]


def _near(bound: Decimal | None, rng: random.Random) -> list[tuple[int, str]]:
    """Texts whose values are next to a bound, and some at random."""
    at = (
        bisect_left(texts(), int(bound * UNIT), key=itemgetter(0)) if bound is not None else rng.randrange(len(texts()))
    )
    return texts()[max(at - 60, 0) : at + 80] + rng.sample(texts(), 40)


def test_all_texts_up_to_five_characters_are_numbers() -> None:
    assert len(texts()) == len({text for _, text in texts()}) == 142_000
    assert all(NUMBER.fullmatch(text) for _, text in texts())


@pytest.mark.parametrize("seed", range(share_of(8)))
def test_ranges_with_bounds_of_two_places_hold_exactly_the_texts_within(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(350):
        low, high = rng.choice(BOUNDS), rng.choice(BOUNDS)
        if rng.random() < 0.5 and low is not None:  # bounds with the same digit before the point share a chain
            high = low + Decimal(rng.randrange(100)) / 100
        excludes_low, excludes_high = rng.random() < 0.5, rng.random() < 0.5
        numbers = NumberRange(
            Decimal(-math.inf) if low is None else low,
            Decimal(math.inf) if high is None else high,
            excludes_low,
            excludes_high,
        )
        pattern = numbers.pattern(is_integer=False)
        assert (pattern is None) is numbers.is_empty
        matches = re.compile(pattern or r"[^\s\S]").fullmatch
        for value, text in {*_near(low, rng), *_near(high, rng), *_near(Decimal(0), rng)}:
            above = low is None or (value > low * UNIT if excludes_low else value >= low * UNIT)
            below = high is None or (value < high * UNIT if excludes_high else value <= high * UNIT)
            assert bool(matches(text)) is (above and below), (numbers, pattern, text)


def _neighbours(bound: Decimal) -> set[str]:
    """Texts that differ from a bound in a digit, at the end, or by their length."""
    text = f"{bound:f}"
    whole, _, fraction = text.partition(".")
    found = {text, text + "0" if fraction else text + ".0", whole}
    found |= {f"{whole}.{fraction[:at]}" for at in range(1, len(fraction) + 1)}
    for at, digit in enumerate(text):
        if digit.isdigit():
            found |= {text[:at] + other + text[at + 1 :] for other in "019" + str((int(digit) + 1) % 10)}
    found |= {one + more for one in (text if fraction else text + ".0",) for more in ("1", "9", "000000001")}
    found |= {other.removeprefix("-") if other[0] == "-" else "-" + other for other in list(found)}
    return {one for one in found if NUMBER.fullmatch(one)}


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30),
    st.floats(-10, 10),
    st.integers(-(10**23), 10**23),
    st.decimals(-1000, 1000, places=6).map(float),
    st.builds(
        lambda sign, power, more: sign * (1 << power) + more,
        st.sampled_from([1, -1]),
        st.integers(50, 70),
        st.integers(-2, 2),
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))]),
    numbers,
    numbers,
)
def test_long_bounds_are_exact_for_their_neighbours_as_decimals_and_as_doubles(
    names: tuple[str, str], one: float, other: float
) -> None:
    """Every text that matches is within, however it is read; every shortest text of a double within matches."""
    schema = dict(zip(names, sorted((one, other)), strict=True))
    allowed = number_range([schema])
    pattern = allowed.pattern(is_integer=False)
    matches = re.compile(pattern or r"[^\s\S]").fullmatch
    around = {
        *_neighbours(decimal_of(one)),
        *_neighbours(decimal_of(other)),
        *_neighbours(decimal_of((one + other) / 2)),
    }
    doubles = [float(bound) for bound in (one, other)]
    around |= {f"{decimal_of(math.nextafter(d, s * math.inf)):f}" for d in doubles for s in (1, -1)}
    for text in around:
        if matches(text):
            assert allowed.contains(float(text)), (text, pattern)
            assert allowed.low <= Decimal(text) <= allowed.high
        elif Decimal(text) == decimal_of(float(text)) and 1e-22 <= abs(float(text)) < 1e25:
            assert not allowed.contains(float(text)), (text, pattern)


@settings(max_examples=200, deadline=None)
@given(st.none() | st.integers(-(10**24), 10**24), st.none() | st.integers(-(10**24), 10**24), st.data())
def test_integers_are_exact_up_to_23_digits(low: int | None, high: int | None, data: st.DataObject) -> None:
    matches = re.compile(integers_between(low, high) or r"[^\s\S]").fullmatch
    inside = st.integers(low, high) if low is None or high is None or low <= high else st.integers()
    around = [bound + near for bound in (low, high, 0) if bound is not None for near in range(-12, 13)]
    for number in (*around, data.draw(inside), data.draw(st.integers(-(10**6), 10**6))):
        is_within = (low is None or low <= number) and (high is None or number <= high)
        assert bool(matches(str(number))) is is_within, number


STEPS = [
    "1",
    "2",
    "5",
    "10",
    "20",
    "50",
    "100",
    "1000",
    "25",
    "4",
    "0.1",
    "0.2",
    "0.5",
    "0.25",
    "0.05",
    "0.01",
    "0.02",
    "0.04",
    "0.001",
    "2.5",
    "0.005",
    "0.0001",
    "500",
    "0.4",
]


@pytest.mark.parametrize("step", STEPS)
def test_multiples_are_exactly_those_of_the_step(step: str) -> None:
    pattern = multiples_of(Fraction(step))
    assert pattern is not None
    matches, scaled = re.compile(pattern).fullmatch, Fraction(step) * UNIT
    for value, text in random.Random(step).sample(texts(), 6000):
        assert bool(matches(text)) is (value % scaled == 0), text


def test_steps_that_do_not_divide_a_power_of_ten_have_no_pattern() -> None:
    assert [multiples_of(Fraction(step)) for step in ("3", "0.3", "7", "0.15", "60")] == [None] * 5


def test_patterns_are_short() -> None:
    """A chain has one link for each run of equal digits, so it grows with the digits and not with their square."""
    longest = [0.1234567890123456, 12345678.90123457, 99999.98765432123, 10**22 + 1234567890123456789]
    for bound in longest:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            assert len(number_range([{name: bound}]).pattern(is_integer=False) or "") < 520
    assert len(decimals_between(Decimal(0), Decimal("0.95")) or "") < 60
    assert len(number_range([{"exclusiveMinimum": 0, "exclusiveMaximum": 1}]).pattern(is_integer=False) or "") < 80


# -- numbers that are no integers ----------------------------------------------------------------------

FRACTION = re.compile(fractions())


def test_all_fractions_of_five_characters_and_no_integers() -> None:
    assert all((FRACTION.fullmatch(text) is not None) is (value % UNIT != 0) for value, text in texts())


def is_far(value: Fraction) -> bool:
    """Returns whether a number is as far from every integer as `fractions` says."""
    num_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    nearest = round(value)
    least = Fraction(1, 10**22) if nearest == 0 else Fraction(10) ** (num_digits - 16)
    return num_digits <= 15 and abs(value - nearest) >= least


@settings(max_examples=300, deadline=None)
@given(
    st.decimals(-1, 20, places=2) | st.sampled_from([Decimal(1), Decimal(-5), Decimal(10**15), Decimal(10**15 + 9)]),
    st.decimals(0, 2, places=2) | st.sampled_from([Decimal("1e-16"), Decimal("1e-15"), Decimal(0)]),
    st.sampled_from([None, Fraction(1, 2), Fraction(1, 4), Fraction(3, 10), Fraction(5, 2), Fraction(2)]),
)
def test_ranges_with_fractions(low: Decimal, width: Decimal, step: Fraction | None) -> None:
    numbers = NumberRange(low, low + width)
    ends = tuple(map(Fraction, numbers.closed(is_integer=False)))
    if step is not None:
        count = range(math.ceil(ends[0] / step), math.floor(ends[1] / step) + 1)
        expected = any((number * step).denominator > 1 for number in count)
    else:
        middles = [Fraction(math.floor(ends[0]) + at) + Fraction(1, 2) for at in range(-1, 4)]
        inner = [max(ends[0], min(ends[1], middle)) for middle in middles]
        expected = any(is_far(one) for one in inner)
    assert numbers.has_fraction(step) is expected


decimal_texts = st.one_of(
    st.from_regex(r"-?(0|[1-9][0-9]{0,15})\.(0{0,22}|9{0,18})[0-9]{1,4}0{0,3}", fullmatch=True),
    st.floats(-1e16, 1e16).map(lambda number: f"{decimal_of(number):f}"),
    st.tuples(st.integers(-(10**15), 10**15), st.sampled_from([-math.inf, math.inf])).map(
        lambda pair: f"{decimal_of(math.nextafter(*pair)):f}"
    ),
)


@settings(max_examples=400, deadline=None)
@given(decimal_texts)
def test_no_fraction_is_read_as_an_integer_and_those_far_from_integers_are_written(text: str) -> None:
    value, has_match = Fraction(text), FRACTION.fullmatch(text) is not None
    assert not has_match or (value.denominator > 1 and float(text) % 1 != 0)
    assert has_match is (value.denominator > 1 and is_far(value))


@settings(max_examples=200, deadline=None)
@given(
    st.from_regex(r"-?[0-9]{1,3}(\.[09]{0,16}[0-9]{1,3})?[eE][+-]?0?[0-9]{1,3}", fullmatch=True),
    st.floats(2e-307, 0.1, exclude_max=True),
)
def test_fractions_with_an_exponent(text: str, small: float) -> None:
    assert not FRACTION.fullmatch(text) or (Fraction(text).denominator > 1 and float(text) % 1 != 0)
    assert FRACTION.fullmatch(repr(small)) and FRACTION.fullmatch(f"{-small:.16e}")
