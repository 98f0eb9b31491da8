"""What stands in a state's text and behind its variables: known text, and answers still on their way.

Each can be read as a value, streamed in pieces (in a thread or on an event loop) and asked for its meta info.

Knows: calls and their results. Must not know: names of variables in a state, sessions, roles.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from plait.lang.errors import ProgramError, program_error, unreadable
from plait.lang.meta import choice_meta, generation_meta
from plait.lang.place import here
from plait.lang.typed.form import Form
from plait.runtime.errors import CallFailed, DeadlineExceeded, InputError

if TYPE_CHECKING:
    from plait.lang.run import Run
    from plait.runtime.client.call import Call, CallResult


class Readable:
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

    async def arrive(self) -> None:
        """Waits on an event loop until `value()` and `meta()` would not wait; raises what they would."""


class Written(Readable):
    """Text that was there from the start. `control`: it is the chat template's own."""

    __slots__ = ("_text", "control")

    def __init__(self, text: str, control: bool = False) -> None:
        self._text = text
        self.control = control

    def text(self) -> str:
        return self._text


class Known(Readable):
    """A variable that the program set itself, to any object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value

    def text(self) -> str:
        return str(self._value)


class Span(Readable):
    """A stretch of a state's text: a `var_scope`, or the content of a turn."""

    def __init__(self, segments: Sequence[Readable]) -> None:
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

    async def arrive(self) -> None:
        for segment in self._segments:
            await segment.arrive()


class Answer(Readable):
    """The outcome of one call. Its failure names the program and the variable."""

    def __init__(self, run: Run, name: str | None, call: Call) -> None:
        self.call = call
        self.siblings: tuple[Answer, ...] = (self,)  # the samples of one gen: the program reads them together
        self.name = name
        self.lane = 0  # which branch it is on, for those who look at a run
        self.began_s = time.monotonic()
        self.ended_s = 0.0  # both by this process's monotonic clock; 0: it goes on
        self.place = here()  # of the line that asked
        self._run = run
        call.add_listener(self._note_end)
        self._note_end()

    def _note_end(self) -> None:
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
            return self._failed(error)
        return None

    async def finish(self) -> None:
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

    async def arrive(self) -> None:
        try:
            await self.call.aresult()
        except CallFailed as error:
            self._raise(error)

    def _raise(self, error: CallFailed) -> NoReturn:
        failed = self._failed(error)
        raise failed from failed.__cause__

    def _failed(self, error: CallFailed) -> ProgramError:
        if self._run.error is not None:  # calls of a failed program are aborted; that is not why it failed
            return self._run.error.again()
        ledger = self._run.ledger
        if ledger is not None and isinstance(error, DeadlineExceeded) and ledger.is_out_of_time():
            return program_error(self._run.program, self.name, ledger.exceeded(), self.place)
        return program_error(self._run.program, self.name, error, self.place)


_UNREAD = object()


class Generated(Answer):
    """Text that the model sampled; its value is the text, or what `form` reads in it, read once."""

    def __init__(self, run: Run, name: str | None, call: Call, form: Form | None = None) -> None:
        super().__init__(run, name, call)
        self.form = form
        self._value: Any = _UNREAD

    def value(self) -> Any:
        if self.form is None:
            return self.text()
        if self._value is _UNREAD:
            self._value = self._read(self.form)
        return self._value

    def _read(self, form: Form) -> Any:
        result = self.result()
        program, text = self._run.program, result.text
        if result.finish_reason == "length" and form.spec is not None and not form.may_be_cut:
            why = f"max_tokens ended the {form.said} after {text[-40:]!r}; raise max_tokens, or leave complete=True on"
            raise unreadable(program, self.name, text, why, self.place)
        try:
            return form.read(text)
        except (ValueError, TypeError, ArithmeticError, KeyError) as error:
            why = f"{text!r:.80} cannot be read as {form.said}: {error}"
            raise unreadable(program, self.name, text, why, self.place) from error

    def meta(self) -> dict[str, Any]:
        return generation_meta(self.result(), self._run.client.tokenizer)


class Chosen(Answer):
    """The choice that scored best."""

    def meta(self) -> dict[str, Any]:
        return choice_meta(self.result(), self.call.scored_choices, self._run.client.tokenizer)


class Several(Readable):
    """n samples of one gen. The value is all their values; the text goes on with the first."""

    def __init__(self, answers: Sequence[Generated]) -> None:
        self.answers = tuple(answers)

    def value(self) -> list[Any]:
        return [answer.value() for answer in self.answers]

    def text(self) -> str:
        return self.answers[0].text()

    def iter_text(self) -> Iterator[str]:
        return self.answers[0].iter_text()

    def aiter_text(self) -> AsyncIterator[str]:
        return self.answers[0].aiter_text()

    def meta(self) -> list[dict[str, Any]]:
        return [answer.meta() for answer in self.answers]

    def abort(self) -> None:
        for answer in self.answers:
            answer.abort()

    async def arrive(self) -> None:
        for answer in self.answers:
            await answer.arrive()
