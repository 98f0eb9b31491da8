"""What a join brings to a state, which may still be generated: lists of values, and copies of texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from plait.lang.core.results import Segment

if TYPE_CHECKING:
    from plait.runtime.client.call import Call


class JoinedValues(Segment):
    """The list of a variable's values in the branches that have it, in their order. A read waits for all of them."""

    def __init__(self, variables: Sequence[Segment]) -> None:
        self.parts = tuple(variables)

    def value(self) -> list[Any]:
        return [variable.value() for variable in self.parts]

    def text(self) -> str:
        return str(self.value())

    def meta(self) -> list[Any]:
        return [variable.meta() for variable in self.parts]

    def partial(self) -> list[Any]:
        return [variable.partial() for variable in self.parts]


class CopiedText(Segment):
    """The text of a segment of a joined branch. Its call is one of the branch, not of this text."""

    def __init__(self, source: Segment) -> None:
        self.parts = (source,)
        self._source = source

    def text(self) -> str:
        return self._source.text()

    def calls(self) -> Sequence[Call]:
        return self._source.calls()

    def iter_text(self) -> Iterator[str]:
        return self._source.iter_text()

    def aiter_text(self) -> AsyncIterator[str]:
        return self._source.aiter_text()
