"""Intrinsics: functions that generate LLVM code where a kernel calls them.

@intrinsic
def copy_floats(b: Any, address: Int, out: Int, count: Int) -> None: ...

`b` is the builder of the calling function. The other parameters are annotated with what they take: a number, as an LLVM
value of that type (Int, Float32), one of a few integers (Annotated[int, OneOf]), integers of a tuple (Ints), or the
pointer of an array (ArrayPointer). The result is a number (Int, Bool, Float32), nothing, or what only `carray` takes
(Any).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import cached_property
from typing import Annotated, Any, NamedTuple, get_type_hints

from plait.kernels.cpu.compiler.values import BOOL, FLOAT32, INT, Number


class OneOf(NamedTuple):
    """One of a few integers, which reaches an intrinsic as Python's number.

    For a number that the kernel does not know, code is generated for each of them, and a choice among it.
    """

    values: tuple[int, ...]


class Passing(Enum):
    """How an argument that is no number reaches an intrinsic."""

    INTS = auto()
    ARRAY = auto()


Int = Annotated[Any, INT]
Bool = Annotated[Any, BOOL]
Float32 = Annotated[Any, FLOAT32]
Ints = Annotated[tuple[Any, ...], Passing.INTS]
ArrayPointer = Annotated[Any, Passing.ARRAY]


class Intrinsic:
    """A function that generates LLVM code where a kernel calls it; Python cannot call it."""

    def __init__(self, generate: Callable[..., Any], when: bool) -> None:
        self.generate, self.when = generate, when
        self.__name__, self.__doc__, self.__module__ = generate.__name__, generate.__doc__, generate.__module__

    @cached_property
    def kinds(self) -> dict[str, Number | OneOf | Passing | None]:
        """What each parameter takes, and "return": the type of the result; None if it is no number."""
        hints = get_type_hints(self.generate, include_extras=True)
        kinds = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
        del kinds["b"]
        return kinds


def intrinsic(generate: Callable[..., Any]) -> Any:
    """Makes an `Intrinsic` of the function that generates its code."""
    return Intrinsic(generate, when=True)


def intrinsic_if(has_instructions: bool) -> Callable[[Callable[..., Any]], Any]:
    """Makes an `Intrinsic` for processors with some instructions; without them a call, never reached, is empty."""
    return lambda generate: Intrinsic(generate, when=has_instructions)


carray: Any = object()
"""What kernels call as `carray(pointer, shape, dtype)`: the C-contiguous array at a pointer."""
