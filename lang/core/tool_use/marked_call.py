"""`MarkedCall`: a gen of a call whose marks are control tokens, such as [TOOL_CALLS], which its text shows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plait.lang.core.results import GenResult
from plait.lang.tools.call_format import ToolCallFormat
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.client.stream import ReadPosition

if TYPE_CHECKING:
    from plait.lang.tools.call_form import FoundCall
    from plait.runtime.chat.formats.control_marks import ControlMarks
    from plait.runtime.client.call import CallResult


class MarkedCall(GenResult):
    """The call is read from the tokens, since text may spell a control token without being one."""

    value_format: ToolCallFormat

    def text(self) -> str:
        return "".join(text for text, _ in self.marked_parts())

    def marked_parts(self) -> Sequence[tuple[str, bool]]:
        return self._marks.split(self._marked_text())

    def iter_text(self) -> Iterator[str]:
        show = self._shown_pieces()
        for _ in self.iter_progress():
            yield from filter(None, (show(),))

    async def aiter_text(self) -> AsyncIterator[str]:
        show = self._shown_pieces()
        async for _ in self.aiter_progress():
            if piece := show():
                yield piece

    def parse_call(self, value_format: ToolCallFormat) -> tuple[FoundCall | None, str]:
        return value_format.parse(self._marked_text(), is_marked=True)

    def _read_value(self, value_format: ValueFormat, result: CallResult) -> Any:
        assert isinstance(value_format, ToolCallFormat)
        marked = self._marked_text()
        reads_marked = replace(value_format, read=lambda text: value_format.read_call(marked, is_marked=True))
        return reads_marked.read_result(self.text(), result.finish_reason)

    @property
    def _marks(self) -> ControlMarks:
        assert self.value_format.form is not None and self.value_format.form.marks is not None
        return self.value_format.form.marks

    def _marked_text(self) -> str:
        return self._marks.detokenizer().push(self.result().token_ids)

    def _shown_pieces(self) -> Callable[[], str]:
        """Returns a function that returns at each call what has arrived of the text since the last one."""
        detokenizer, position = self._marks.detokenizer(), ReadPosition()

        def show() -> str:
            nonlocal position
            update, position = self.call.read_since(position)
            return "".join(text for text, _ in self._marks.split(detokenizer.push(update.token_ids)))

        return show
