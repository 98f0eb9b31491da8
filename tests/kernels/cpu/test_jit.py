"""`inner_njit`: functions that only compiled functions call."""

from __future__ import annotations

import numba
import pytest

from plait.kernels.cpu import jit


@jit.inner_njit
def scaled(x, factor):
    return x * factor


@numba.njit
def sum_of_scaled(count):
    total = 0
    for i in range(count):
        total += scaled(i, 3)
    return total


def test_compiled_functions_can_call_inner_functions():
    assert sum_of_scaled(5) == 30


@pytest.mark.skipif(
    numba.version_info.short != jit.TESTED_NUMBA, reason="2026-11-22: other versions of numba compile wrappers"
)
def test_python_cannot_call_inner_functions():
    with pytest.raises(TypeError):
        scaled(1, 2)


def test_other_versions_of_numba_compile_inner_functions_in_the_ordinary_way(monkeypatch):
    monkeypatch.setattr(jit, "TESTED_NUMBA", (0, 0))
    assert jit.inner_njit(lambda x: x + 1)(2) == 3
