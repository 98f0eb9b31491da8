"""What a join brings to a state, which may still be generated: lists of values, and copies of texts."""

from __future__ import annotations

from plait.lang.core.results import Segment, ValueList


class JoinedValues(ValueList):
    """The list of a variable's values in the branches that have it, in their order. A read waits for all of them."""

    def text(self) -> str:
        return str(self.value())


class CopiedText(Segment):
    """The text of a segment of a joined branch. Its call is one of the branch, not of this text."""

    def __init__(self, source: Segment) -> None:
        self.parts = self.text_parts = (source,)
