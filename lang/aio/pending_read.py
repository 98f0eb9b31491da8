"""A read that is still to be awaited, and says so to whoever takes it for the value."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from plait.runtime.errors import InputError

T = TypeVar("T")


class Pending(Coroutine[Any, Any, T]):
    """`s["x"]` of an async program: a coroutine, for `await`, `asyncio.gather` and tasks, and nothing else."""

    def __init__(self, read: Coroutine[Any, Any, T], said: str) -> None:
        self._read = read
        self._said = said

    def __await__(self) -> Generator[Any, None, T]:
        return self._read.__await__()

    def send(self, value: Any) -> Any:
        return self._read.send(value)

    def throw(self, kind: Any, error: Any = None, traceback: TracebackType | None = None) -> Any:
        return self._read.throw(kind if error is None else error)

    def close(self) -> None:
        self._read.close()

    def __repr__(self) -> str:
        return f"<{self._said}, to be awaited>"

    if not TYPE_CHECKING:  # a checker says so itself

        def _refuse(self, *_: object) -> NoReturn:
            self._read.close()  # nobody will await it
            raise InputError(f"{self._said} is still to be awaited: write (await {self._said})")

        __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __str__ = __format__ = _refuse
        __len__ = __iter__ = __contains__ = __getitem__ = __int__ = __float__ = __add__ = __radd__ = _refuse
        __hash__ = object.__hash__

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith(("_", "cr_", "gi_")):  # what event loops ask any coroutine for
                return getattr(self.__dict__["_read"], name)
            self._read.close()
            raise AttributeError(f"{self._said} is still to be awaited: write (await {self._said}).{name}")
