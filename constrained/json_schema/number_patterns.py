"""Patterns of the JSON numbers between two bounds, built from the digits of the bounds.

A number is `-?(0|[1-9][0-9]*)(\\.[0-9]+)?`, without an exponent. A text is compared with a bound at the first digit in
which they differ, so a pattern is a chain with a link for each run of equal digits of the bound:

    0 <= x <= 0.95     (0(\\.([0-8][0-9]*|9([0-4][0-9]*|50*|)))?|-0(\\.0+)?)

None stands for the pattern of no text.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

Number = TypeVar("Number", int, Decimal)
_MOST_PLACES = 30  # of a step, behind the point
_DIGIT = "[0-9]"
_MORE = "[0-9]*"
_WHOLE = "(0|[1-9][0-9]*)"
_FRACTION = r"(\.[0-9]+)?"


@lru_cache(maxsize=1024)
def decimals_between(low: Decimal | None, high: Decimal | None) -> str | None:
    """Returns the pattern of the numbers x with low <= x <= high; a bound of None is none.

    >>> print(decimals_between(Decimal("0.5"), Decimal("12")))
    (0\\.[5-9][0-9]*|([1-9]|1[0-1])(\\.[0-9]+)?|12(\\.0+)?)
    """
    return _with_signs(low, high, Decimal(0), _decimals)


@lru_cache(maxsize=1024)
def integers_between(low: int | None, high: int | None) -> str | None:
    """Returns the pattern of the integers x with low <= x <= high, written without a fraction.

    >>> integers_between(7, 123)
    '([7-9]|[1-9][0-9]|1([0-1][0-9]|2[0-3]))'
    """
    return _with_signs(low, high, 0, _integers)


@lru_cache(maxsize=1)
def fractions() -> str:
    """Returns the pattern of the numbers that are no integers, not even once they are read as doubles.

    Half of the distance between two doubles of n digits before the point is less than 10^(n - 16) for n <= 15, so a
    number that is at least as far from every integer is read as none. Below 0.1 all are read right down to 1e-307;
    these may have an exponent, behind one digit before the point. Numbers above 10^15 are left out.
    """
    small = rf"[1-9]{_FRACTION}[eE]-(0?[2-9]|[1-9][0-9]|[12][0-9][0-9]|30[0-7])"
    below_one = rf"0\.{_between('0' * 21 + '1', '9' * 16)}"
    others = (
        rf"[1-9]{_repeated(_DIGIT, n - 1, n - 1)}\.{_between('0' * (15 - n) + '1', '9' * (16 - n))}"
        for n in range(1, 16)
    )
    return f"-?{_any_of(small, below_one, *others)}"


def contains_fraction(low: Decimal, high: Decimal) -> bool:
    """Returns whether a number x with 0 <= low <= x <= high matches `fractions`.

    >>> contains_fraction(Decimal(1), Decimal(1)), contains_fraction(Decimal(1), Decimal("1.1"))
    (False, True)
    """
    high = min(high, Decimal(10**15))
    if low > high:
        return False
    for whole in (int(low), int(low) + 1, int(high)):
        near = Decimal(10) ** (len(str(whole)) - 16) if whole else Decimal("1e-16")
        if max(low, whole + (near if whole else Decimal("1e-22"))) <= min(high, whole + 1 - near) and whole < 10**15:
            return True
    return False


def multiples_of(step: Fraction) -> str | None:
    """Returns the pattern of the multiples of c * 10^e if c divides 100; None for any other step.

    A number is a multiple if its last digits, as many from the place e on as c needs, are one of a few texts.

    >>> print(multiples_of(Fraction(1, 20)), multiples_of(Fraction(3)))
    -?(0|[1-9][0-9]*)(\\.([0-9]|[0-9](|5)0*))? None
    """
    digits = str(step * 10**_MOST_PLACES)  # an integer, unless the step has more places
    factor, exponent = digits.rstrip("0"), len(digits) - len(digits.rstrip("0")) - _MOST_PLACES
    if not factor.isdigit():
        return None
    width = next((width for width in range(3) if 10**width % int(factor) == 0), None)
    if width is None:
        return None
    ends = [f"{number:0{width}d}" if width else "" for number in range(0, 10**width, int(factor))]
    num_free = -exponent - width  # places behind the point and before the ends
    if num_free < 0:
        return f"-?{_ending_with([end + '0' * max(exponent, 0) for end in ends], max(-exponent, 0))}"
    tails = [end.rstrip("0") for end in ends]
    if num_free == 0:
        options = _any_of(*(f"{tail}0*" for tail in tails if tail), "0+")
    else:
        options = f"({_repeated(_DIGIT, 1, num_free)}|{_repeated(_DIGIT, num_free, num_free)}{_any_of(*tails)}0*)"
    return f"-?{_WHOLE}(\\.{options})?"


def _ending_with(ends: list[str], num_places: int) -> str | None:
    """Returns the pattern of the numbers that end with one of these digits, the last `num_places` behind the point."""
    wholes: dict[str, list[str]] = {}
    for end in ends:
        point = len(end) - num_places
        wholes.setdefault(end[point:].rstrip("0"), []).append(end[:point])
    options = []
    for fraction, some in wholes.items():
        whole = _any_of(f"[1-9][0-9]*{_any_of(*some)}", *(str(int(digits)) for digits in some))
        options.append(f"{whole}\\.{fraction}0*" if fraction else f"{whole}(\\.0+)?")
    return _any_of(*options)


def _with_signs(
    low: Number | None, high: Number | None, zero: Number, between: Callable[[Number, Number | None], str | None]
) -> str | None:
    """Returns the pattern of a range from `between(low, high)`, which is that of a range of numbers from 0 on."""
    positive = between(zero if low is None else max(low, zero), high)
    negative = between(zero if high is None else max(-high, zero), None if low is None else -low)
    if positive == negative:
        return positive and f"-?{positive}"
    return _any_of(positive, negative and f"-{negative}")


def _any_of(*options: str | None) -> str | None:
    found = [option for option in options if option is not None]
    return f"({'|'.join(found)})" if len(found) > 1 else found[0] if found else None


def _decimals(low: Decimal, high: Decimal | None) -> str | None:
    if high is not None and low > high:
        return None
    first, above = _digits(low)
    start = f"{_literal(first)}\\.{_at_least(above)}" if above else None
    next_whole = int(first) + bool(above)
    if high is None:
        return _any_of(start, f"{_integers(next_whole, None)}{_FRACTION}")
    last, below = _digits(high)
    if first == last:
        whole = _literal(first)
        return f"{whole}\\.{_between(above, below)}" if above else f"{whole}(\\.{_at_most(below)})?"
    inner = _integers(next_whole, int(last) - 1)
    return _any_of(start, inner and f"{inner}{_FRACTION}", f"{_literal(last)}(\\.{_at_most(below)})?")


def _digits(number: Decimal) -> tuple[str, str]:
    """Returns the digits before and behind the point, without zeros at the end."""
    whole, _, fraction = f"{number:f}".partition(".")
    return whole, fraction.rstrip("0")


def _between(low: str, high: str) -> str:
    """Returns the pattern of the digits t with 0.low <= 0.t <= 0.high, where 0 < 0.low <= 0.high."""
    common = _common_prefix(low, high)
    if common == low:
        return _literal(common) + _at_most(high[len(common) :], may_end=True)
    low, high = low[len(common) :], high[len(common) :]
    start = f"{low[0]}{_at_least(low[1:])}" if len(low) > 1 else None
    first, last = int(low[0]) + (start is not None), int(high[0]) - 1
    middle = f"{_class(first, last)}{_MORE}" if first <= last else None
    return f"{_literal(common)}{_any_of(start, middle, f'{high[0]}{_at_most(high[1:], may_end=True)}')}"


def _at_least(fraction: str) -> str:
    """Returns the pattern of the digits t with 0.t >= 0.fraction."""
    if not fraction:
        return _MORE
    digit, run, rest = _first_run(fraction)
    if run == 1 and not rest:
        return f"{_class(int(digit), 9)}{_MORE}"
    if rest == str(int(digit) + 1):
        return f"{_repeated(digit, 0, run)}{_class(int(rest), 9)}{_MORE}"
    larger = f"{_repeated(digit, 0, run - 1)}{_class(int(digit) + 1, 9)}{_MORE}" if digit != "9" else None
    return _any_of(larger, f"{_repeated(digit, run, run)}{_at_least(rest)}") or ""


def _at_most(fraction: str, *, may_end: bool = False) -> str:
    """Returns the pattern of the digits t with 0.t <= 0.fraction; t may have no digit only with `may_end`."""
    if not fraction:
        return "0*" if may_end else "0+"
    digit, run, rest = _first_run(fraction)
    smaller = f"{_repeated(digit, 0, run - 1)}{_class(0, int(digit) - 1)}{_MORE}" if digit != "0" else None
    shorter = _repeated(digit, 0 if may_end else 1, run - 1) if may_end or run > 1 else None
    return _any_of(smaller, f"{_repeated(digit, run, run)}{_at_most(rest, may_end=True)}", shorter) or ""


def _integers(low: int, high: int | None) -> str | None:
    """Returns the pattern of the integers from `low`, which is at least 0, to `high`."""
    power = 10 ** len(str(low))
    if high is None:
        behind = power // 10 if str(low).strip("0") == "1" else power
        longer = f"[1-9]{_repeated(_DIGIT, len(str(behind)) - 1)}"
        return _WHOLE if low == 0 else _any_of(_integers(low, behind - 1), longer)
    options: list[str | None] = []
    while low <= high:
        num_digits, num_full = len(str(low)), len(str(high + 1)) - 1  # all numbers of num_full digits are at most high
        if low == 10 ** (num_digits - 1) and num_digits <= num_full:
            last = 10**num_full - 1
            options.append(f"[1-9]{_repeated(_DIGIT, num_digits - 1, num_full - 1)}")
        else:
            last = min(high, 10**num_digits - 1)
            options.append(_of_one_length(str(low), str(last)))
        low = last + 1
    return _any_of(*options)


def _of_one_length(low: str, high: str) -> str:
    """Returns the pattern of the digits from `low` to `high`, all of one length."""
    common = _common_prefix(low, high)
    low, high = low[len(common) :], high[len(common) :]
    if not low:
        return _literal(common)
    num_more = len(low) - 1
    takes_low, takes_high = not low[1:].strip("0"), not high[1:].strip("9")
    first, last = int(low[0]) + (not takes_low), int(high[0]) - (not takes_high)
    start = None if takes_low else low[0] + _of_one_length(low[1:], "9" * num_more)
    middle = f"{_class(first, last)}{_repeated(_DIGIT, num_more, num_more)}" if first <= last else None
    end = None if takes_high else high[0] + _of_one_length("0" * num_more, high[1:])
    return f"{_literal(common)}{_any_of(start, middle, end)}"


def _common_prefix(one: str, other: str) -> str:
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differing, min(len(one), len(other)))]


def _first_run(digits: str) -> tuple[str, int, str]:
    """Returns the first digit, how often it is repeated, and the digits behind."""
    rest = digits.lstrip(digits[0])
    return digits[0], len(digits) - len(rest), rest


def _literal(digits: str) -> str:
    runs = ((digit, len(list(group))) for digit, group in groupby(digits))
    return "".join(_repeated(digit, count, count) for digit, count in runs)


def _class(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _repeated(pattern: str, low: int, high: int | None = None) -> str:
    """Returns a pattern repeated from `low` to `high` times; None: any number of times from `low` on."""
    if high == 0:
        return ""
    if low == high:
        return pattern if low == 1 else min(pattern * low, f"{pattern}{{{low}}}", key=len)
    if high is None:
        return f"{pattern}{'*' if low == 0 else '+' if low == 1 else f'{{{low},}}'}"
    return f"{pattern}?" if (low, high) == (0, 1) else f"{pattern}{{{low},{high}}}"
