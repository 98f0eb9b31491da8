"""`Pending`: a read of an async program that was not awaited yet. Using it as the value raises an error."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from plait.lang.usage import ProgramUsage
from plait.runtime.errors import InputError

T = TypeVar("T")


class Pending(Coroutine[Any, Any, T]):
    """`s["x"]` of an async program: a coroutine, for `await`, `asyncio.gather` and tasks. `label` is its source
    text."""

    def __init__(self, read: Coroutine[Any, Any, T], label: str) -> None:
        self._read = read
        self._label = label

    def __await__(self) -> Generator[Any, None, T]:
        return self._read.__await__()

    def send(self, value: Any) -> Any:
        return self._read.send(value)

    def throw(self, kind: Any, error: Any = None, traceback: TracebackType | None = None) -> Any:
        return self._read.throw(kind if error is None else error)

    def close(self) -> None:
        self._read.close()

    def __repr__(self) -> str:
        return f"<{self._label}, not awaited>"

    if not TYPE_CHECKING:  # type checkers report these themselves

        def _refuse(self, *_: object) -> NoReturn:
            self._read.close()  # nothing will await it
            raise InputError(f"{self._label} was not awaited: write (await {self._label})")

        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __str__ = __format__ = _refuse
        __len__ = __iter__ = __contains__ = __getitem__ = __int__ = __float__ = __add__ = __radd__ = _refuse
        __hash__ = object.__hash__

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith(("_", "cr_", "gi_")):  # attributes that event loops read from any coroutine
                return getattr(self.__dict__["_read"], name)
            self._read.close()
            raise AttributeError(f"{self._label} was not awaited: write (await {self._label}).{name}")


class PendingUsage(Pending[ProgramUsage]):
    """`s.usage` of an async program. Until 0.2 it was a method, so `await s.usage()` still works, with a warning."""

    def __call__(self) -> PendingUsage:
        warnings.warn("write `await s.usage` instead of `await s.usage()`", DeprecationWarning, stacklevel=2)
        return self


class Done:
    """What `await` returns from at once."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield
