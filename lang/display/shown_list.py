"""`ShownList`: lists of states and of beams, which a notebook shows as a table."""

from __future__ import annotations

from typing import Any, SupportsIndex, TypeVar, overload

T = TypeVar("T")


class ShownList(list[T]):
    """A list that a notebook shows as a table; a part of it is one too."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> ShownList[T]: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return ShownList(found) if isinstance(index, slice) else found

    def _repr_html_(self) -> str | None:
        """Returns a table for notebooks; None for a list that has come to hold other things."""
        from plait.lang.control.beam import BeamHypothesis  # lazy: few programs need them
        from plait.lang.display.states import states_html
        from plait.lang.display.tables import beams_html
        from plait.lang.states.base_state import BaseState

        if self and all(isinstance(item, BaseState) for item in self):
            return states_html(self)  # type: ignore[arg-type]
        if self and all(isinstance(item, BeamHypothesis) for item in self):
            return beams_html(self)  # type: ignore[arg-type]
        return None
