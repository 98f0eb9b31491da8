"""Segments: the parts of a state's text and the values of its variables; known text, or the result of a call.

Each can be read as a value, streamed in pieces (from a thread or on an event loop) and asked for its meta info.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from plait.lang.core.value_weight import value_weight
from plait.lang.errors import Attempt, ProgramError, program_error, unreadable_value
from plait.lang.meta_info import GenMeta, SelectMeta, choice_meta, generation_meta
from plait.lang.source_location import caller_location
from plait.lang.typed.value_format import RefusedValue, ValueFormat
from plait.runtime.errors import VALUE_DOES_NOT_FIT, CallFailed, DeadlineExceeded, InputError

if TYPE_CHECKING:
    from plait.lang.budget import BudgetExceeded
    from plait.lang.core.run import Run
    from plait.lang.tools.call_form import FoundCall
    from plait.lang.tools.call_format import ToolCallFormat
    from plait.runtime.client.call import Call, CallResult


class Segment:
    """Base class. `value()` is the value of a variable, `text()` its part of the state's text.

    `parts`: the segments that it is computed from. It is ready when they are. `text_parts`: those whose texts in a row
    are its text; None if its text is computed in another way.
    """

    parts: tuple[Segment, ...] = ()
    text_parts: tuple[Segment, ...] | None = None

    def value(self) -> Any:
        """Waits for the value and returns it. Raises ProgramError if its call failed."""
        return self.text()

    def text(self) -> str:
        """Waits for the text and returns it. Raises ProgramError if its call failed."""
        return "".join(part.text() for part in self.text_parts or ())

    def marked_parts(self) -> Sequence[tuple[str, bool]]:
        """Waits for the text and returns its parts, each with whether control tokens in it count."""
        return ((self.text(), False),)

    def meta(self) -> Any:
        """Returns the meta info of the call. Raises InputError for a value without a call."""
        raise InputError("the program set this value itself, so there is no meta info of a call")

    def weight(self) -> Any:
        """Returns the log weight of the value, see `value_weight`; for n samples a list."""
        found = value_weight(self.meta(), self.text())
        return [sample.weight for sample in found] if type(found) is list else found.weight

    def logprob(self) -> Any:
        """Returns the logprob of the value under its constraint, see `value_weight`; for n samples a list."""
        found = value_weight(self.meta(), self.text())
        return [sample.logprob for sample in found] if type(found) is list else found.logprob

    def has_format(self, value_format: ValueFormat | None) -> bool:
        """Whether this is the result of the gen with this format, and has one value."""
        return False

    def calls(self) -> Sequence[Call]:
        """Returns the calls that generate the text."""
        parts = self.parts if self.text_parts is None else self.text_parts
        return [call for part in parts for call in part.calls()]

    def abort(self) -> None:
        """Ends the calls that are still running."""
        for part in self.parts:
            part.abort()

    def partial(self) -> Any:
        """Returns the value as far as it is generated, or None. Does not wait. Raises InputError for a value without a
        call."""
        raise InputError("there is no partial value: the program set this value itself, or computed it from others")

    def iter_progress(self) -> Iterator[None]:
        """Yields whenever `partial()` may have changed, and once when the value is complete; of several parts one after
        the other."""
        for part in self.parts:
            yield from part.iter_progress()
        if not self.parts:
            self.value()
            yield

    async def aiter_progress(self) -> AsyncIterator[None]:
        """`iter_progress()` for an event loop."""
        for part in self.parts:
            async for _ in part.aiter_progress():
                yield
        if not self.parts:
            yield

    def iter_text(self) -> Iterator[str]:
        """Yields the text in pieces as it is generated."""
        if self.text_parts is None:
            yield self.text()
        for part in self.text_parts or ():
            yield from part.iter_text()

    async def aiter_text(self) -> AsyncIterator[str]:
        """`iter_text()` for an event loop."""
        if self.text_parts is None:
            await self.wait_ready()
            yield self.text()
        for part in self.text_parts or ():
            async for piece in part.aiter_text():
                yield piece

    async def wait_ready(self) -> None:
        """Waits on an event loop until `value()` and `meta()` return at once. Raises the same errors as they do."""
        for part in self.parts:
            await part.wait_ready()


class TextSegment(Segment):
    """Known text. `control`: it comes from the chat template."""

    __slots__ = ("_text", "control")

    def __init__(self, text: str, control: bool = False) -> None:
        self._text = text
        self.control = control

    def text(self) -> str:
        return self._text

    def marked_parts(self) -> Sequence[tuple[str, bool]]:
        return ((self._text, self.control),)


class AssignedValue(Segment):
    """A variable that the program itself set, to any object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value

    def text(self) -> str:
        return str(self._value)


class SegmentRange(Segment):
    """A range of a state's text: a `var_scope`, the content of a turn, or what a joined branch has generated."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.parts = self.text_parts = tuple(segments)


class ValueList(Segment):
    """A list of values, in the order of `parts`: those of a variable in the branches that have it, or samples."""

    def __init__(self, parts: Sequence[Segment]) -> None:
        self.parts = tuple(parts)

    def value(self) -> list[Any]:
        return [part.value() for part in self.parts]

    def text(self) -> str:
        return str(self.value()) if self.text_parts is None else super().text()

    def meta(self) -> list[Any]:
        return [part.meta() for part in self.parts]

    def partial(self) -> list[Any]:
        return [part.partial() for part in self.parts]


class CallSegment(Segment):
    """The result of one call. `value_format`: that of its value, if it has a type. Its ProgramError names the program
    and the variable."""

    def __init__(self, run: Run, name: str | None, call: Call, value_format: ValueFormat | None = None) -> None:
        self.call, self.value_format = call, value_format
        self.siblings: tuple[CallSegment, ...] = (self,)  # all samples of one gen: the program reads them together
        self.name = name
        self.is_cut_by_budget = False  # whether its max_tokens is what the budget left
        self.branch_id = 0  # the number of its branch in traces
        self.began_s = time.monotonic()
        self.ended_s = 0.0  # time.monotonic() like `began_s`; 0 while the call runs
        self.place = caller_location()  # the line of the program that made the call
        self._run = run
        call.add_listener(self._record_end)
        self._record_end()

    def _record_end(self) -> None:
        if not self.ended_s and self.call.done():
            self.ended_s = time.monotonic()

    def result(self) -> CallResult:
        """Waits for the call and returns its result. Raises ProgramError if it failed."""
        try:
            return self.call.result()
        except CallFailed:
            with self._named_failures():  # entered only then: every read of a value comes here
                raise

    def failure(self) -> ProgramError | None:
        """Waits for the call. Returns its error, or None."""
        try:
            self.call.result()
        except CallFailed as error:
            return self._program_error(error)
        return None

    async def wait_finished(self) -> None:
        """Waits on an event loop until the call has ended, successfully or not."""
        with contextlib.suppress(CallFailed):
            await self.call.aresult()

    def text(self) -> str:
        return self.result().text

    def calls(self) -> Sequence[Call]:
        return (self.call,)

    def abort(self) -> None:
        self.call.abort()

    def iter_text(self) -> Iterator[str]:
        with self._named_failures():
            yield from self.call.iter_text()

    async def aiter_text(self) -> AsyncIterator[str]:
        with self._named_failures():
            async for piece in self.call.aiter_text():
                yield piece

    def partial(self) -> Any:
        return self.value() if self.call.done() else None

    def iter_progress(self) -> Iterator[None]:
        with self._named_failures():
            yield from self.call.iter_progress()

    async def aiter_progress(self) -> AsyncIterator[None]:
        with self._named_failures():
            async for _ in self.call.aiter_progress():
                yield

    async def wait_ready(self) -> None:
        with self._named_failures():
            await self.call.aresult()

    @contextlib.contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Raises a failure of the call as a ProgramError."""
        try:
            yield
        except CallFailed as error:
            failed = self._program_error(error)
            raise failed from failed.__cause__

    def _program_error(self, error: CallFailed) -> ProgramError:
        if self._run.error is not None:  # a failed program aborts its calls; report the original error
            return self._run.error.copy_to_raise()
        return program_error(self._run.program, self.name, self._budget_error(error) or error, self.place)

    def _budget_error(self, error: CallFailed) -> BudgetExceeded | None:
        """Returns the error of the budget if the call failed because of its limits, else None."""
        tracker = self._run.budget_tracker
        if tracker is None:
            return None
        if isinstance(error, DeadlineExceeded) and tracker.is_out_of_time():
            return tracker.exceeded_error()
        if self.is_cut_by_budget and error.kind == VALUE_DOES_NOT_FIT:
            return tracker.exceeded_error(str(error))
        return None


_NOT_PARSED = object()


class GenResult(CallSegment):
    """Sampled text. Its value is the text, or the object that `value_format` parses from it (once)."""

    def __init__(self, run: Run, name: str | None, call: Call, value_format: ValueFormat | None = None) -> None:
        super().__init__(run, name, call, value_format)
        self._value: Any = _NOT_PARSED

    def value(self) -> Any:
        if self.value_format is None:
            return self.text()
        if self._value is _NOT_PARSED:
            self._value = self._parse(self.value_format)
        return self._value

    def partial(self) -> Any:
        if self.call.done():
            return self.value()
        if self.value_format is None:
            return self.call.text_so_far()
        read_partial = self.value_format.read_partial
        return None if read_partial is None else read_partial(self.call.text_so_far())

    def has_format(self, value_format: ValueFormat | None) -> bool:
        return self.value_format is value_format

    def _parse(self, value_format: ValueFormat) -> Any:
        result = self.result()
        try:
            return self._read_value(value_format, result)
        except RefusedValue as refusal:
            attempts = self._attempts(result.text, refusal)
            raise unreadable_value(self._run.program, self.name, attempts, self.place) from refusal.__cause__

    def _read_value(self, value_format: ValueFormat, result: CallResult) -> Any:
        return value_format.read_result(result.text, result.finish_reason)

    def parse_call(self, value_format: ToolCallFormat) -> tuple[FoundCall | None, str]:
        """Returns the call of a tool in the text, and what the text is without one."""
        return value_format.parse(self.text())

    def _attempts(self, text: str, refusal: RefusedValue) -> tuple[Attempt, ...]:
        """Returns all texts that were refused; `text` is the last one."""
        return (Attempt(text, str(refusal)),)

    def meta(self) -> GenMeta:
        return generation_meta(self.result(), self._run.client.tokenizer)


class SelectResult(CallSegment):
    """The best-scored choice of a select."""

    def value(self) -> Any:
        return self.text() if self.value_format is None else self.value_format.read(self.text())

    def meta(self) -> SelectMeta:
        return choice_meta(self.result(), self.call.scored_choices, self._run.client.tokenizer)


class Samples(ValueList):
    """The n samples of one gen. The value is the list of their values; the text is that of the first sample."""

    def __init__(self, call_segments: Sequence[GenResult]) -> None:
        super().__init__(call_segments)
        self.call_segments = tuple(call_segments)
        self.text_parts = self.parts[:1]
