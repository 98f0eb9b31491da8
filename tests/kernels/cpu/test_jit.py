"""`inner_njit`: functions that only compiled functions call."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from plait.kernels.cpu import jit
from plait.kernels.cpu.compiler import numba_pipeline


@jit.inner_njit
def scaled(x, factor):
    return x * factor


@numba.njit
def sum_of_scaled(count):
    total = 0
    for i in range(count):
        total += scaled(i, 3)
    return total


@jit.inner_njit
def tail(array):
    return array[1:]


@jit.inner_njit
def sum_of_tail(array):
    total = 0
    for value in tail(array):
        total += value
    return total


@numba.njit
def sums_of_tails(array, count):
    total = 0
    for _ in range(count):
        total += sum_of_tail(array) + tail(array)[0]
    return total


def test_compiled_functions_can_call_inner_functions():
    assert sum_of_scaled(5) == 30


@pytest.mark.skipif(
    numba.version_info.short != numba_pipeline.TESTED_NUMBA,
    reason="2026-11-22: other versions of numba compile wrappers",
)
def test_python_cannot_call_inner_functions():
    with pytest.raises(TypeError):
        scaled(1, 2)


def test_other_versions_of_numba_compile_inner_functions_in_the_ordinary_way(monkeypatch):
    monkeypatch.setattr(numba_pipeline, "TESTED_NUMBA", (0, 0))
    assert jit.inner_njit(lambda x: x + 1)(2) == 3


def test_arrays_of_python_outlive_inner_functions():
    array = np.arange(5)
    assert sums_of_tails(array, 100) == 1100 and array.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(
    numba.version_info.short != numba_pipeline.TESTED_NUMBA,
    reason="2026-11-23: other versions of numba count references",
)
def test_inner_functions_that_return_no_array_count_no_references():
    """Optimization would remove most of the counting, but only after it took time to compile."""
    sums_of_tails(np.arange(5), 1)
    modules = [result.library.get_llvm_str() for result in sum_of_tail.dispatcher.overloads.values()]
    assert modules and not any("NRT_" in module for module in modules)
