"""Marks of the functions that kernels consist of.

`compiler` reads the marked functions and generates a kernel's code. numba, whose import takes a quarter of a second,
is imported only when a function that numba compiles uses a marked one, as tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

Function = Callable[..., Any]


class KernelFunction:
    """A function that kernels call: `py_func` for the compiler, and a function of numba for functions of numba."""

    def __init__(self, py_func: Function, is_inner: bool) -> None:
        self.py_func = py_func
        self._is_inner = is_inner
        self.__name__, self.__doc__, self.__module__ = py_func.__name__, py_func.__doc__, py_func.__module__

    @cached_property
    def dispatcher(self) -> Any:
        """The function as numba compiles it."""
        from plait.kernels.cpu.compiler import numba_pipeline

        return (numba_pipeline.compile_inner if self._is_inner else numba_pipeline.compile_outer)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        """What functions that numba compiles see of a global variable."""
        return self.dispatcher._numba_type_

    def __call__(self, *args: Any) -> Any:
        """As numba's own functions do; those of `inner_njit` raise TypeError."""
        return self.dispatcher(*args)


def inner_njit(function: Function) -> Any:
    """Marks a function that only compiled functions call; a call from Python raises TypeError."""
    return KernelFunction(function, is_inner=True)


def njit(function: Function) -> Any:
    """Marks a function that tests call from Python, too."""
    return KernelFunction(function, is_inner=False)


class Intrinsic:
    """A function that generates LLVM code where a compiled function calls it, as `numba.extending.intrinsic` makes it.

    `define` (context, types of the arguments) returns the signature and the generator.
    """

    def __init__(self, define: Function, prefer_literal: bool) -> None:
        self.define, self.prefer_literal = define, prefer_literal
        self.__name__, self.__doc__, self.__module__ = define.__name__, define.__doc__, define.__module__

    @cached_property
    def _numba_type_(self) -> Any:
        from plait.kernels.cpu.compiler import numba_pipeline

        return numba_pipeline.type_of_intrinsic(self.define, self.prefer_literal)


def intrinsic(define: Function) -> Any:
    """Makes an `Intrinsic` of the function that defines it."""
    return Intrinsic(define, prefer_literal=False)


def literal_intrinsic(define: Function) -> Any:
    """Makes an `Intrinsic` whose definition gets integers that are known as literal types."""
    return Intrinsic(define, prefer_literal=True)


class _Carray:
    """`numba.carray` (pointer, shape, dtype): the C-contiguous array at a pointer."""

    @property
    def _numba_type_(self) -> Any:
        from plait.kernels.cpu.compiler import numba_pipeline

        return numba_pipeline.type_of_carray()


carray: Any = _Carray()
