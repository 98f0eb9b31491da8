"""One text of a running program, with its session: `BranchText` whose long steps leave the event loop to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from plait.runtime.client.session import Session
from plait.runtime.errors import InputError
from plait.runtime.programs.branch import BranchText
from plait.runtime.seed_path import SeedPath
from plait.runtime.server.generation.submission import (
    TOKENIZE_IN_THREAD_CHARS,
    YIELD_AFTER_CHARS,
    check_fits_context,
)
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.tokenizer.chat_template import ChatTemplate

if TYPE_CHECKING:
    from plait.runtime.programs.steps import Step
    from plait.runtime.server.protocols.programs.program_run import ProgramRun

TURNS_AT_ONCE = 32
TEXT_COST_CHARS = 20  # a text's own cost of being tokenized, in characters

T = TypeVar("T")

PendingText: TypeAlias = "asyncio.Task[str]"  # the text of a call that may still run
Value: TypeAlias = "str | PendingText | list[Value]"


@dataclass(frozen=True)
class TextPiece:
    """A part of the text; `control`: from the chat template, so that it may have control tokens."""

    text: str | PendingText
    control: bool = False


class ProgramBranch(BranchText[TextPiece, Value]):
    """`run` has all sessions of the program. A fork adds its own at once, so that whoever ends it finds them."""

    def __init__(
        self,
        run: ProgramRun,
        session: Session,
        parent: ProgramBranch | None = None,
        seed_path: SeedPath | None = None,
    ) -> None:
        super().__init__(TextPiece, parent, seed_path)
        self.run, self._session = run, session
        self._num_unsent = 0  # characters that the next call or fork tokenizes
        self._num_unsent_texts = 0

    def session(self) -> Session:
        return self._session

    def template(self) -> ChatTemplate:
        if self.run.template is None:
            raise InputError("this model has no chat template, so it has no turns; use text")
        return self.run.template

    def write(self, text: str, *, control: bool = False) -> None:
        super().write(text, control=control)
        self._num_unsent += len(text)
        self._num_unsent_texts += 1

    async def run_tokenizing(self, start: Callable[[], T]) -> T:
        """`start()`, which tokenizes the text written since the last call; in a thread if that text is long.

        A thread cannot be cancelled: after a cancellation `start` goes on, and at its end the sessions are aborted.
        Raises ContextOverflow, before any work, for a text that cannot fit however it is tokenized.
        """
        check_fits_context(self.run.client, self._num_unsent)
        cost = self._num_unsent + TEXT_COST_CHARS * self._num_unsent_texts
        self._num_unsent = self._num_unsent_texts = 0
        if cost <= TOKENIZE_IN_THREAD_CHARS:
            if cost > YIELD_AFTER_CHARS:
                await asyncio.sleep(0)  # a program may have many such calls in a row
            return start()
        work = asyncio.ensure_future(asyncio.to_thread(start))

        def end_abandoned(work: asyncio.Task[T]) -> None:
            if not work.cancelled():
                work.exception()  # asyncio logs an exception that nobody retrieves
            self.run.abort_sessions()

        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.add_done_callback(end_abandoned)
            raise
        return work.result()

    async def begin_role(self, role: str, following: Sequence[Step]) -> None:
        """Begins a turn. Rendering many turns takes long, and has a thread."""
        prefix = await run_in_thread_if(len(self.turns) > TURNS_AT_ONCE, self.turn_prefix, role)
        self.run.count_turns(self.template().num_rendered_turns(len(self.turns)))
        await asyncio.sleep(0)  # a program may have many turns in a row
        self.open_turn_with(role, prefix)

    def fork_session(self, size: int) -> Sequence[Session]:
        sessions = super().fork_session(size)
        self.run.sessions += sessions
        return sessions

    def child(self, session: Session, seed_path: SeedPath) -> ProgramBranch:
        return ProgramBranch(self.run, session, self, seed_path)

    def copy_segment(self, segment: TextPiece) -> None:
        """Appends the text of a piece of another branch, for which its calls were waited."""
        text = segment.text if isinstance(segment.text, str) else segment.text.result()
        self.write(text, control=segment.control)

    async def write_variable(self, name: str, index: Sequence[int]) -> None:
        """Writes the text of a variable, or of an item in it. Waits for its call."""
        self.write(await self.text_of(name, index))

    async def text_of(self, name: str, index: Sequence[int]) -> str:
        """Returns the text of a variable, or of an item in it. Waits for its call."""
        value = self.variables[name]
        for number in index:
            assert isinstance(value, list)
            value = value[number]
        return str(await resolve_value(value))

    async def text(self, first: int = 0, end: int | None = None) -> str:
        return "".join([str(await resolve_value(piece.text)) for piece in self.segments[first:end]])


async def resolve_value(value: Value) -> object:
    """A variable's value as JSON; waits for its calls."""
    if isinstance(value, list):
        return [await resolve_value(item) for item in value]
    return value if isinstance(value, str) else await value
