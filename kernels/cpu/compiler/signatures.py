"""Types of an intrinsic's arguments and result, which its definition names (imported as `types`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Signature(NamedTuple):
    """The types of an intrinsic's result and arguments."""

    return_type: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Scalar:
    """A number, a pointer, or nothing; called with types of arguments, it is the result of a signature."""

    name: str

    def __call__(self, *args: Any) -> Signature:
        return Signature(self, args)


@dataclass(frozen=True)
class UniTuple:
    """A tuple of `count` values of one type."""

    dtype: Scalar
    count: int


@dataclass(frozen=True)
class Array:
    """A C-contiguous array."""

    dtype: str
    ndim: int


@dataclass(frozen=True)
class Literal:
    """An integer that is known while the caller is compiled."""

    literal_value: int


int64, uint16, float32 = Scalar("int64"), Scalar("uint16"), Scalar("float32")
boolean, void, voidptr = Scalar("boolean"), Scalar("void"), Scalar("voidptr")
