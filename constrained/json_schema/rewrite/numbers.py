"""The numbers that `minimum`, `maximum` and their exclusive forms allow: what is proved about them, and their pattern.

Bounds and values are compared as decimals; a fraction in a schema is the shortest decimal of its double. A validator
that reads a value as the nearest double may find it equal to an excluded bound, so the pattern of fractions is that
from the first double that is allowed to the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from itertools import count
from typing import Any

from plait.constrained.json_schema.number_patterns import contains_fraction, decimals_between, integers_between
from plait.constrained.specs import GrammarError

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EXACT = 1 << 53  # every integer closer to 0, and its neighbours, are doubles
_LARGEST = (1 << 63) - 1024  # the largest double that llguidance takes as a bound
_LEAST = Decimal("1e-22")  # the least number above 0 that has at most MAX_DIGITS digits
_MOST_DIGITS = 60  # of a bound, without zeros at the end: a pattern is nested as deep


@dataclass(frozen=True)
class NumberRange:
    """The numbers x with low <= x <= high, without low or high if these are excluded; infinities: no bound.

    >>> NumberRange(Decimal(0), Decimal("0.5"), excludes_low=True).contains(0.0)
    False
    """

    low: Decimal = Decimal(-math.inf)
    high: Decimal = Decimal(math.inf)
    excludes_low: bool = False
    excludes_high: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it is certain that no number is in the range."""
        return self.low > self.high or (self.low == self.high and (self.excludes_low or self.excludes_high))

    def contains(self, value: float) -> bool:
        """Returns whether a number of a JSON value is in the range."""
        number = decimal_of(value)
        return (self.low < number or (self.low == number and not self.excludes_low)) and (
            number < self.high or (number == self.high and not self.excludes_high)
        )

    def pattern(self, *, is_integer: bool) -> str | None:
        """Returns the pattern of the texts of these numbers, or of the integers among them; None if there are none.

        >>> NumberRange(Decimal("0.5"), Decimal(1), excludes_high=True).pattern(is_integer=False)
        '0\\\\.([5-8][0-9]*|9(9{0,14}[0-8][0-9]*|9{15}0*|9{0,14}))'
        """
        low, high = self.closed(is_integer=is_integer)
        if low == math.inf or high == -math.inf or self.is_empty:
            return None
        if is_integer:
            return integers_between(*(int(end) if end.is_finite() else None for end in (low, high)))
        return decimals_between(*(end if end.is_finite() else None for end in (low, high)))

    def has_multiple(self, step: Fraction, *, is_integer: bool) -> bool:
        """Returns whether a number, or integer, in the range is a multiple of `step`."""
        low, high = self.closed(is_integer=is_integer)
        if low.is_infinite() or high.is_infinite():
            return low < high
        step = common_multiple(step, Fraction(1)) if is_integer else step
        return Fraction(high) // step >= Fraction(low) / step

    def has_fraction(self, step: Fraction | None = None) -> bool:
        """Returns whether a number in the range, and a multiple of `step` if that is given, is written as no integer.

        >>> NumberRange(Decimal(1), Decimal("1.5"), excludes_high=True).has_fraction(Fraction(1, 2))
        False
        """
        low, high = self.closed(is_integer=False)
        if step is None:
            return any(contains_fraction(max(a, Decimal(0)), b) for a, b in ((low, high), (-high, -low)))
        if low.is_infinite() and high.is_infinite():
            return step.denominator > 1
        if low.is_infinite():
            low, high = -high, -low
        first = math.ceil(Fraction(low) / step)
        found = [number * step for number in (first, first + 1)]  # one of two in a row is no integer
        return any(one.denominator > 1 and (high.is_infinite() or one <= Fraction(high)) for one in found)

    def closed(self, *, is_integer: bool) -> tuple[Decimal, Decimal]:
        """Returns the least and the greatest integer, or double, in the range; infinities: no bound."""
        move = _integer_inside if is_integer else _double_inside
        low = move(self.low, self.excludes_low, 1) if self.low.is_finite() else self.low
        return low, move(self.high, self.excludes_high, -1) if self.high.is_finite() else self.high


def _integer_inside(bound: Decimal, is_excluded: bool, sign: int) -> Decimal:
    """Returns the first integer behind a bound, above it for `sign` 1 and below it for -1."""
    integer = math.ceil(bound) if sign > 0 else math.floor(bound)
    return _short(integer + sign if is_excluded and integer == bound else integer, sign)


def _double_inside(bound: Decimal, is_excluded: bool, sign: int) -> Decimal:
    """Returns the shortest decimal of the first double behind a bound."""
    if is_excluded and not bound:
        return _LEAST * sign
    number = float(bound)
    while (distance := (decimal_of(number) - bound) * sign) < 0 or (is_excluded and not distance):
        number = math.nextafter(number, sign * math.inf)
    shortest = decimal_of(number)
    return _short(int(shortest), sign) if 1e17 < abs(number) < math.inf else shortest


def _decimal_inside(bound: Decimal, is_excluded: bool, sign: int) -> Decimal:
    """Returns a decimal of 15 digits behind a bound: llguidance may read more digits as a double next to theirs."""
    if not bound.is_finite() or not bound:
        return _LEAST * sign if is_excluded and not bound else bound
    context = Context(prec=15, rounding=ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    short = context.plus(bound)
    if not is_excluded or short != bound:
        return short
    return context.next_plus(bound) if sign > 0 else context.next_minus(bound)


def _short(integer: int, sign: int) -> Decimal:
    """Returns the integer, or a power of ten behind it if it has many digits before its last zeros."""
    digits = str(abs(integer))
    if len(digits.rstrip("0")) <= _MOST_DIGITS:
        return Decimal(integer)
    power = 10 ** (len(digits) - 1)
    return Decimal(sign * (10 * power if integer * sign > 0 else -power))


def decimal_of(number: float) -> Decimal:
    """Returns the decimal that a JSON number means: for a fraction, the shortest one that is read as it."""
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def common_multiple(*steps: Fraction) -> Fraction:
    """Returns the least number that is a multiple of all these.

    >>> common_multiple(Fraction(3, 20), Fraction(1, 10))
    Fraction(3, 10)
    """
    unit = math.lcm(*(step.denominator for step in steps))
    return Fraction(math.lcm(*(int(step * unit) for step in steps)), unit)


def number_range(parts: Iterable[dict[str, Any]]) -> NumberRange:
    """Returns the numbers that the bounds of all these schemas allow; those of draft 4 too."""
    lows, highs = [(Decimal(-math.inf), False)], [(Decimal(math.inf), False)]
    for part in parts:
        for bounds, closed in ((lows, "minimum"), (highs, "maximum")):
            exclusive = part.get("exclusive" + closed.capitalize(), False)
            if closed in part:
                bounds.append((decimal_of(part[closed]), exclusive is True))
            if not isinstance(exclusive, bool):
                bounds.append((decimal_of(exclusive), True))
    low, excludes_low = max(lows)
    high, excludes_high = min(highs, key=lambda bound: (bound[0], not bound[1]))
    return NumberRange(low, high, excludes_low, excludes_high)


def needs_pattern(schema: dict[str, Any], *, is_integer: bool) -> bool:
    """Returns whether the bounds or the step of a schema need a pattern of our own.

    llguidance is right about integers between bounds that are integers, and doubles. Its patterns of fractions accept
    some excluded bounds, and lack the prefixes of a bound and zeros behind it; its multiples have no zeros at the end.

    >>> needs_pattern({"minimum": 0}, is_integer=True), needs_pattern({"minimum": 0}, is_integer=False)
    (False, True)
    """
    if not is_integer:
        return not schema.keys().isdisjoint((*BOUNDS, "multipleOf"))
    return any(abs(schema[name]) >= _EXACT or schema[name] != int(schema[name]) for name in BOUNDS if name in schema)


def closed_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema, for a place where no pattern can be written, with bounds that llguidance reads right.

    Every value that it accepts is within the bounds. Raises GrammarError if no number of 64 bits is.

    >>> closed_bounds({"exclusiveMinimum": 0, "maximum": 0.95})
    {'minimum': 1e-22, 'maximum': 0.95}
    >>> closed_bounds({"exclusiveMinimum": 0, "maximum": 0.95, "multipleOf": 0.3})
    {'multipleOf': 0.3, 'minimum': 0.3, 'exclusiveMaximum': 1}
    """
    if schema.keys().isdisjoint(BOUNDS):
        return schema
    numbers = number_range([schema])
    step = Fraction(decimal_of(schema["multipleOf"])) if "multipleOf" in schema else None
    if numbers.is_empty or (step and not numbers.has_multiple(step, is_integer=False)):
        return schema  # no value, which llguidance finds too
    low = _decimal_inside(numbers.low, numbers.excludes_low, 1)
    high = _decimal_inside(numbers.high, numbers.excludes_high, -1)
    if low > _LARGEST or high < -_LARGEST:
        raise GrammarError("no number within its bounds can be written", "")
    out = {name: value for name, value in schema.items() if name not in BOUNDS}
    if low.is_finite():
        first = Fraction(max(low, Decimal(-_LARGEST)))
        out["minimum"] = _as_number(math.ceil(first / step) * step if step else first)
    if high.is_finite():
        last = Fraction(min(high, Decimal(_LARGEST)))
        last = last // step * step if step else last
        whole = math.floor(last) + 1  # llguidance allows all digits behind the point before a bound that is an integer
        is_next = step is not None and 0 <= last < whole <= last + step
        out |= {"exclusiveMaximum": whole} if is_next else {"maximum": _as_number(last)}
    return out


def multiples_within(numbers: NumberRange, step: Fraction) -> list[dict[str, Any]]:
    """Returns alternatives for llguidance: the multiples of `step` with each number of digits behind the point.

    llguidance alone accepts 0.30 as a multiple of 0.15, and not 0.3.

    >>> multiples_within(NumberRange(high=Decimal("2")), Fraction(3, 2))
    [{'multipleOf': 3, 'exclusiveMaximum': 1}, {'multipleOf': 1.5, 'exclusiveMaximum': 2}]
    """
    low, high = numbers.closed(is_integer=False)
    bounds = {"minimum": low, "maximum": high}
    within = {name: _as_number(Fraction(bound)) for name, bound in bounds.items() if bound.is_finite()}
    places = next(places for places in count() if (step * 10**places).denominator == 1)
    steps = dict.fromkeys(common_multiple(step, Fraction(1, 10**at)) for at in range(places + 1))
    found = [one for one in steps if numbers.has_multiple(one, is_integer=False)]
    return [closed_bounds({"multipleOf": _as_number(one), **within}) for one in found]


def _as_number(number: Fraction) -> float:
    return int(number) if number.denominator == 1 else float(number)
