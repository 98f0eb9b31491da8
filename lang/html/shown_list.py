"""`ShownList`: lists of states and of beams, which a notebook shows as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

T = TypeVar("T")


class ShownList(list[T]):
    """A list that a notebook shows as a table; a part of it is one too."""

    def __init__(self, show: Callable[[Sequence[T]], str], items: Iterable[T]) -> None:
        """`show`: makes the table."""
        super().__init__(items)
        self._show = show

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> ShownList[T]: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return ShownList(self._show, found) if isinstance(index, slice) else found

    def _repr_html_(self) -> str:
        """Returns a table for notebooks."""
        return self._show(self)
