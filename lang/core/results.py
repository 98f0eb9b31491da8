"""What stands in a state's text and behind its variables: known text, and answers still on their way.

Each can be read as a value, streamed in pieces (in a thread or on an event loop) and asked for its meta info.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from plait.lang.errors import ProgramError, program_error, unreadable_value
from plait.lang.meta_info import choice_meta, generation_meta
from plait.lang.source_location import caller_location
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.errors import CallFailed, DeadlineExceeded, InputError

if TYPE_CHECKING:
    from plait.lang.core.run import Run
    from plait.runtime.client.call import Call, CallResult


class Segment:
    """Something with a value. `text()` is what it adds to the text of the state."""

    def value(self) -> Any:
        """Waits for the value. Raises ProgramError when its call failed."""
        return self.text()

    def text(self) -> str:
        raise NotImplementedError

    def meta(self) -> Any:
        """The meta info of the call behind the value."""
        raise InputError("the program made this value itself: no call has meta info for it")

    def abort(self) -> None:
        """Ends the call behind the value, if there is one and it still goes on."""

    def iter_text(self) -> Iterator[str]:
        """The text as it comes."""
        yield self.text()

    async def aiter_text(self) -> AsyncIterator[str]:
        """`iter_text()` for an event loop."""
        yield self.text()

    async def wait_ready(self) -> None:
        """Waits on an event loop until `value()` and `meta()` would not wait; raises what they would."""


class TextSegment(Segment):
    """Text that was there from the start. `control`: it is the chat template's own."""

    __slots__ = ("_text", "control")

    def __init__(self, text: str, control: bool = False) -> None:
        self._text = text
        self.control = control

    def text(self) -> str:
        return self._text


class AssignedValue(Segment):
    """A variable that the program set itself, to any object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value

    def text(self) -> str:
        return str(self._value)


class SegmentRange(Segment):
    """A stretch of a state's text: a `var_scope`, or the content of a turn."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)

    def text(self) -> str:
        return "".join(segment.text() for segment in self._segments)

    def iter_text(self) -> Iterator[str]:
        for segment in self._segments:
            yield from segment.iter_text()

    async def aiter_text(self) -> AsyncIterator[str]:
        for segment in self._segments:
            async for piece in segment.aiter_text():
                yield piece

    async def wait_ready(self) -> None:
        for segment in self._segments:
            await segment.wait_ready()


class CallSegment(Segment):
    """The outcome of one call. Its failure names the program and the variable."""

    def __init__(self, run: Run, name: str | None, call: Call) -> None:
        self.call = call
        self.siblings: tuple[CallSegment, ...] = (self,)  # the samples of one gen: the program reads them together
        self.name = name
        self.lane = 0  # which branch it is on, for those who look at a run
        self.began_s = time.monotonic()
        self.ended_s = 0.0  # both by this process's monotonic clock; 0: it goes on
        self.place = caller_location()  # of the line that asked
        self._run = run
        call.add_listener(self._record_end)
        self._record_end()

    def _record_end(self) -> None:
        if not self.ended_s and self.call.done():
            self.ended_s = time.monotonic()

    def result(self) -> CallResult:
        try:
            return self.call.result()
        except CallFailed as error:
            self._raise(error)

    def failure(self) -> ProgramError | None:
        """Waits for the call; the error it ended with, or None."""
        try:
            self.call.result()
        except CallFailed as error:
            return self._program_error(error)
        return None

    async def wait_finished(self) -> None:
        """Waits on an event loop for the call's end, whatever it is."""
        with contextlib.suppress(CallFailed):
            await self.call.aresult()

    def text(self) -> str:
        return self.result().text

    def abort(self) -> None:
        self.call.abort()

    def iter_text(self) -> Iterator[str]:
        try:
            yield from self.call.iter_text()
        except CallFailed as error:
            self._raise(error)

    async def aiter_text(self) -> AsyncIterator[str]:
        try:
            async for piece in self.call.aiter_text():
                yield piece
        except CallFailed as error:
            self._raise(error)

    async def wait_ready(self) -> None:
        try:
            await self.call.aresult()
        except CallFailed as error:
            self._raise(error)

    def _raise(self, error: CallFailed) -> NoReturn:
        failed = self._program_error(error)
        raise failed from failed.__cause__

    def _program_error(self, error: CallFailed) -> ProgramError:
        if self._run.error is not None:  # calls of a failed program are aborted; that is not why it failed
            return self._run.error.copy_to_raise()
        budget_tracker = self._run.budget_tracker
        if budget_tracker is not None and isinstance(error, DeadlineExceeded) and budget_tracker.is_out_of_time():
            return program_error(self._run.program, self.name, budget_tracker.exceeded_error(), self.place)
        return program_error(self._run.program, self.name, error, self.place)


_NOT_PARSED = object()


class GenResult(CallSegment):
    """Text that the model sampled; its value is the text, or what `value_format` reads in it, read once."""

    def __init__(self, run: Run, name: str | None, call: Call, value_format: ValueFormat | None = None) -> None:
        super().__init__(run, name, call)
        self.value_format = value_format
        self._value: Any = _NOT_PARSED

    def value(self) -> Any:
        if self.value_format is None:
            return self.text()
        if self._value is _NOT_PARSED:
            self._value = self._read(self.value_format)
        return self._value

    def _read(self, value_format: ValueFormat) -> Any:
        result = self.result()
        program, text = self._run.program, result.text
        if result.finish_reason == "length" and value_format.spec is not None and not value_format.allows_truncation:
            why = f"max_tokens ended the {value_format.type_name} after {text[-40:]!r}; raise max_tokens, or leave complete=True on"
            raise unreadable_value(program, self.name, text, why, self.place)
        try:
            return value_format.read(text)
        except (ValueError, TypeError, ArithmeticError, KeyError) as error:
            why = f"{text!r:.80} cannot be read as {value_format.type_name}: {error}"
            raise unreadable_value(program, self.name, text, why, self.place) from error

    def meta(self) -> dict[str, Any]:
        return generation_meta(self.result(), self._run.client.tokenizer)


class SelectResult(CallSegment):
    """The choice that scored best."""

    def meta(self) -> dict[str, Any]:
        return choice_meta(self.result(), self.call.scored_choices, self._run.client.tokenizer)


class Samples(Segment):
    """n samples of one gen. The value is all their values; the text goes on with the first."""

    def __init__(self, call_segments: Sequence[GenResult]) -> None:
        self.call_segments = tuple(call_segments)

    def value(self) -> list[Any]:
        return [call_segment.value() for call_segment in self.call_segments]

    def text(self) -> str:
        return self.call_segments[0].text()

    def iter_text(self) -> Iterator[str]:
        return self.call_segments[0].iter_text()

    def aiter_text(self) -> AsyncIterator[str]:
        return self.call_segments[0].aiter_text()

    def meta(self) -> list[dict[str, Any]]:
        return [call_segment.meta() for call_segment in self.call_segments]

    def abort(self) -> None:
        for call_segment in self.call_segments:
            call_segment.abort()

    async def wait_ready(self) -> None:
        for call_segment in self.call_segments:
            await call_segment.wait_ready()
