"""The compiler of kernels: what it compiles does what Python does, and it refuses all else with file and line."""

from __future__ import annotations

import ctypes
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.cpu import llvm
from plait.kernels.cpu.attention.workspace import float32_array, int64_array
from plait.kernels.cpu.compiler.functions import KernelModule
from plait.kernels.cpu.compiler.intrinsics import Int, OneOf, intrinsic, intrinsic_if
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.compiler.values import CompileError
from plait.kernels.cpu.vector_ops import address_of

SIZE, ROWS, WIDTH = 24, 4, 6
ENABLED, LIMIT = False, 5


class Pair(NamedTuple):
    first: Any
    second: Any


class Nested(NamedTuple):
    pair: Pair
    out: Any


def divisions(out, x, y):
    y = y if y else 3
    out[0], out[1], out[2], out[3] = x // y, x % y, x // 8, x % 8
    out[4], out[5], out[6], out[7] = -x // 7, -x % 7, x >> 3, (x & 0xFF) << 2
    out[8], out[9] = x // 1, x % 1


def choices(out, x, y):
    out[0], out[1], out[2] = min(x, y, 3), max(x, y, -3), -x
    out[3] = 1 if x < y else y
    out[4] = (x if x > 0 else 0) if y else -1
    is_between = (x > -5 and y > -5) or x == y
    out[5] = 7 if is_between and not x > 100 else 8
    if x > y:
        out[6] = 1
    elif x == y or ENABLED:
        out[6] = 2
    else:
        out[6] = 3
    if ENABLED and out[99] > 0:
        out[7] = 1
    if (x and y) or LIMIT == 5:
        out[8] = 4


def loops(out, x, y):
    total, steps = 0, abs_of(x) % 9
    for i in range(steps):
        if i == 3:
            continue
        for j in range(i, 20, 3):
            if j * i > 30:
                break
            total += j
    for i in range(steps, -2, -1):
        total = 2 * total - i
    while True:
        if total % LIMIT == 0:
            break
        total += 1
    for k in (x, y, 3):
        if k < 0:
            continue
        total += k
    while steps > 2 and total < 1000:
        total, steps = total + steps, steps - 1
    out[0], out[1] = total, steps


def abs_of(x):
    if x < 0:
        return -x
    return x


def first_multiple(start, factor):
    for i in range(start, start + 50):
        if i % factor == 0:
            return i, True
    return start, False


def steps(first, end, step):
    while True:
        if first >= end:
            break
        for i in range(first, first + 2):  # noqa: UP028, compiled code knows no `yield from`
            yield i
        first += step


def pairs(end):
    for i in steps(0, end, 3):
        yield i, end - i


def generators(out, x, y):
    i = 0
    for i in steps(x % 3, 8, 3):
        if i == 4:
            continue
        out[i] = i * y
        i = 20
    for i, rest in pairs(y % 5):
        for j in steps(0, 2, 1):
            out[i + 12] += rest + j
    out[23] = i


def records(out, x, y):
    pair = Pair(x, y)
    nested = Nested(pair, out[4:])
    for _ in range(3):
        pair = Pair(pair.second, pair.first + nested.pair.second)
    nested.out[0], nested.out[1] = pair
    nested.out[4] = pair._replace(second=y + 3).second
    write_fields(nested._replace(pair=pair))
    (number, is_found), other = first_multiple(abs_of(x), 7), pair[1]
    out[0], out[1], out[2], out[3] = number, int(is_found), other, len(pair)


def write_fields(nested):
    nested.out[2] = nested.pair.first
    nested.out[3] += nested.pair.second


def slices(out, x, y):
    begin, end = abs_of(x) % 40, abs_of(y) % 40
    part, rest, head = out[begin:end], out[begin:], out[:end]
    for i in range(len(part)):
        part[i] = i
    for i in range(len(rest)):
        rest[i] += 10
    for i in range(len(head)):
        head[i] *= 3
    matrix = out.reshape((ROWS, WIDTH))
    rows, width = matrix.shape
    for row in range(rows):
        matrix[row, row] += width
    middle = matrix[1:3]
    middle[1, 2] = middle.shape[0]
    matrix[2][1:][0] -= 5
    matrix[3, 2:4][1] = 11


FUNCTIONS = [divisions, choices, loops, generators, records, slices]
COMPILED: dict[Any, Any] = {}
NUMBERS = st.integers(-300, 300)


def compiled(function: Any, array_at: Any) -> Any:
    """Returns the machine code of a function of an array and two integers."""

    def kernel(address, x, y):
        function(array_at(address, SIZE), x, y)

    if function not in COMPILED:
        address = KernelLibrary(f"test-{function.__name__}", kernel).load()["kernel"]
        COMPILED[function] = ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)
    return COMPILED[function]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@settings(deadline=None)
@given(x=NUMBERS, y=NUMBERS)
def test_integers_arrays_and_records_are_those_of_python(function, x, y) -> None:
    expected, actual = np.arange(SIZE), np.concatenate([np.arange(SIZE), np.zeros(SIZE, np.int64)])
    function(expected, x, y)
    compiled(function, int64_array)(actual.ctypes.data, x, y)
    assert actual[:SIZE].tolist() == expected.tolist()
    assert not actual[SIZE:].any(), "written behind the array"


def floats(out, x, y):
    wide = 0.1 * x
    narrow = np.float32(wide) * np.float32(y) + out[0]
    out[1], out[2] = narrow, np.float32(x) / np.float32(3)
    out[3] = np.sqrt(np.float32(x * x) + np.float32(2.0))
    out[4] = -narrow
    out[5] = np.float32(wide * 3.7)
    out[6] = np.int64(wide)
    out[7] = x
    best = np.float32(-np.inf)
    for i in range(len(out)):
        if not out[i] <= best:
            best = out[i]
            if best != best:
                break
    out[8] = best


@settings(deadline=None)
@given(x=NUMBERS, y=NUMBERS, has_nan=st.booleans())
def test_floats_are_those_of_numpy(x, y, has_nan) -> None:
    expected = np.linspace(-3, 5, SIZE, dtype=np.float32)
    if has_nan:
        expected[20] = np.nan
    actual = expected.copy()
    floats(expected, x, y)
    compiled(floats, float32_array)(actual.ctypes.data, x, y)
    assert np.array_equal(actual, expected, equal_nan=True)


def int_becomes_float(out, x, y):
    x = 0.5
    out[0] = x


def item_of_unknown_index(out, x, y):
    out[0] = (x, y)[x]


def negative_index(out, x, y):
    out[-1] = 1


def two_results(out, x, y):
    out[0] = one_of_two_types(x)


def one_of_two_types(x):
    if x:
        return 1
    return 0.5


def calls_itself(out, x, y):
    calls_itself(out, x, y)


def python_function(out, x, y):
    print(x)


def comprehension(out, x, y):
    out[0] = len([i * x for i in range(3)])


def true_quotient(out, x, y):
    out[0] = x / y


def unassigned(out, x, y):
    for i in range(2):
        if i:
            out[0] = later  # noqa: F821, assigned below
        later = x  # noqa: F841


@intrinsic
def stored(b: Any, address: Int, number: Annotated[int, OneOf((7, 8, 9))]) -> None:
    b.store(llvm.I64(number), llvm.pointer_at(b, address, llvm.I64))


@intrinsic_if(False)
def stored_elsewhere(b: Any, address: Int) -> None:
    raise AssertionError("this processor has no such instruction")


def one_of_a_few(out, x, y):
    stored(address_of(out), 7)
    stored(address_of(out) + 8, x)
    stored_elsewhere(address_of(out))


def another_integer(out, x, y):
    stored(address_of(out), 6)


def address_of_a_number(out, x, y):
    out[0] = address_of(x)


def left_generator(out, x, y):
    for i in steps(0, x, 1):
        if i:
            break


def returning():
    yield 1
    return


def generator_with_return(out, x, y):
    for i in returning():
        out[i] = 1


def generator_without_argument(out, x, y):
    for i in steps(x, y):
        out[i] = 1


def missing_argument(out, x, y):
    stored(x)


def unknown_field(out, x, y):
    out[0] = Pair(x, y)._replace(third=1)[0]


def unnamed_field(out, x, y):
    out[0] = Pair(x, y)._replace(1)[0]


def fields_of_a_number(out, x, y):
    out[0] = x._replace(first=1)


REFUSED = [
    another_integer, address_of_a_number, missing_argument, left_generator, generator_with_return,
    generator_without_argument,
    int_becomes_float, item_of_unknown_index, negative_index, two_results, calls_itself, python_function, comprehension,
    true_quotient, unassigned, unknown_field, unnamed_field, fields_of_a_number,
]  # fmt: skip


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_is_not_known_is_refused_with_file_and_line(function) -> None:
    def kernel(address, x, y):
        function(int64_array(address, SIZE), x, y)

    with pytest.raises(CompileError, match=r"^kernel test_language\.py:\d+: "):
        KernelModule("refused").add_entry("kernel", kernel)


def literal_and_address(out, x, y):
    int64_array(address_of(out[3:]), 2)[1] = 42


def test_intrinsics_take_arrays() -> None:
    out = np.zeros(SIZE, np.int64)
    compiled(literal_and_address, int64_array)(out.ctypes.data, 0, 0)
    assert out[4] == 42 and out.sum() == 42


@pytest.mark.parametrize("x", [7, 8, 9])
def test_intrinsics_take_one_of_a_few_integers_and_are_empty_without_their_instructions(x) -> None:
    out = np.zeros(SIZE, np.int64)
    compiled(one_of_a_few, int64_array)(out.ctypes.data, x, 0)
    assert out[:2].tolist() == [7, x] and not out[2:].any()


def test_a_kernel_has_no_result() -> None:
    with pytest.raises(CompileError, match="result"):
        KernelModule("refused").add_entry("kernel", abs_of)
