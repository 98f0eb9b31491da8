"""One text of a running program: its session, pieces, turns and variables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from plait.runtime.client.client import Client
from plait.runtime.client.session import Session
from plait.runtime.errors import InputError
from plait.runtime.seed_path import SeedPath
from plait.runtime.server.generation.aside import run_aside
from plait.runtime.server.generation.submission import (
    TOKENIZE_IN_THREAD_CHARS,
    YIELD_AFTER_CHARS,
    check_fits_context,
)
from plait.runtime.tokenizer.chat_template import ChatTemplate

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

    async def resolve(self) -> str:
        return self.text if isinstance(self.text, str) else await self.text


@dataclass
class ProgramBranch:
    """`template`: the chat template of its turns, if the model has one.

    `turns`: (role, index of the first piece, index after the last) of the finished turns.
    """

    client: Client
    session: Session
    variables: dict[str, Value]
    template: ChatTemplate | None = None
    pieces: list[TextPiece] = field(default_factory=list)
    turns: list[tuple[str, int, int]] = field(default_factory=list)
    seed_path: SeedPath = field(default_factory=SeedPath)
    open_role: str | None = None
    _num_known_chars: int = 0  # of the next texts: those that the session has from the call before them
    _num_unsent: int = 0  # characters that the next call or fork tokenizes
    _num_unsent_texts: int = 0

    def write(self, text: str, *, control: bool = False) -> None:
        """Appends text."""
        num_known = min(self._num_known_chars, len(text))
        self._num_known_chars -= num_known
        self.session.append(text[num_known:], control=control)
        self._num_unsent += len(text)
        self._num_unsent_texts += 1
        self.pieces.append(TextPiece(text, control))

    def expect_known(self, text: str) -> None:
        """Says that the session has the next text already, from the last call; `write` will write it."""
        self._num_known_chars = len(text)

    async def run_tokenizing(self, start: Callable[[], T], abandoned: Callable[[], None]) -> T:
        """`start()`, which tokenizes the text written since the last call; in a thread if that text is long.

        A thread cannot be cancelled: after a cancellation `start` goes on, and `abandoned()` is called at its end.
        Raises ContextOverflow, before any work, for a text that cannot fit however it is tokenized.
        """
        check_fits_context(self.client, self._num_unsent)
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
            abandoned()

        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.add_done_callback(end_abandoned)
            raise
        return work.result()

    async def begin_turn(self, role: str) -> int:
        """Begins a turn; returns the index of its first piece. Rendering many turns takes long, and has a thread."""
        template, roles = self._template(), self._roles()
        prefix = await run_aside(len(roles) > TURNS_AT_ONCE, template.turn_prefix, roles, role)
        await asyncio.sleep(0)  # a program may have many turns in a row
        self.write(prefix, control=True)
        self.open_role = role
        return len(self.pieces)

    def end_turn(self, role: str, first: int) -> None:
        suffix = self.turn_suffix(role)
        self.open_role = None
        self.turns.append((role, first, len(self.pieces)))
        self.write(suffix, control=True)

    def turn_suffix(self, role: str) -> str:
        """The template's text after the open turn."""
        return self._template().turn_suffix(self._roles(), role)

    def fork(self, size: int) -> list[ProgramBranch]:
        """`size` copies of this branch."""
        return [
            ProgramBranch(
                self.client, session, dict(self.variables), self.template, list(self.pieces), list(self.turns)
            )
            for session in self.session.fork(size)
        ]

    async def append_tail(self, child: ProgramBranch, start: int, num_turns: int) -> None:
        """Appends the pieces of `child` from `start` on and its turns from `num_turns` on; waits for their texts."""
        shift = len(self.pieces) - start
        for piece in child.pieces[start:]:
            self.write(await piece.resolve(), control=piece.control)
        self.turns += [(role, first + shift, end + shift) for role, first, end in child.turns[num_turns:]]

    async def text(self, first: int = 0, end: int | None = None) -> str:
        return "".join([await piece.resolve() for piece in self.pieces[first:end]])

    def _roles(self) -> Sequence[str]:
        return [role for role, _, _ in self.turns]

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise InputError("this model has no chat template, so it has no turns; use text")
        return self.template


async def resolve_value(value: Value) -> object:
    """A variable's value as JSON."""
    if isinstance(value, list):
        return [await resolve_value(item) for item in value]
    return value if isinstance(value, str) else await value
