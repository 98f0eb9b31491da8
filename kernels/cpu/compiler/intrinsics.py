"""Intrinsics: functions that generate LLVM code where a kernel calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Intrinsic:
    """A function that generates LLVM code where a kernel calls it; Python cannot call it.

    `define` (context, types of the arguments) returns the signature and the generator.
    """

    def __init__(self, define: Callable[..., Any], prefer_literal: bool) -> None:
        self.define, self.prefer_literal = define, prefer_literal
        self.__name__, self.__doc__, self.__module__ = define.__name__, define.__doc__, define.__module__


def intrinsic(define: Callable[..., Any]) -> Any:
    """Makes an `Intrinsic` of the function that defines it."""
    return Intrinsic(define, prefer_literal=False)


def literal_intrinsic(define: Callable[..., Any]) -> Any:
    """Makes an `Intrinsic` whose definition gets integers that are known as literal types."""
    return Intrinsic(define, prefer_literal=True)


carray: Any = object()
"""What kernels call as `carray(pointer, shape, dtype)`: the C-contiguous array at a pointer."""
