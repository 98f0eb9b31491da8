"""What a body that is being compiled holds as `s`: states and groups whose reads give unknown values.

Knows: handles and what they may do. Must not know: how a graph is checked or shown, who runs the body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from plait.lang.aio.state import AsyncState
from plait.lang.answers import Known, Readable, Written
from plait.lang.compiled.groups import AsyncTapeGroup, TapeGroup
from plait.lang.compiled.later import Later
from plait.lang.compiled.nodes import BeginScope, End, EndScope, ForkInto, Read, RunTool
from plait.lang.compiled.tape import Tape, TapeStrand, record
from plait.lang.compiled.unknown import Env, NotKnown, Result
from plait.lang.expressions import Expr, Typed, as_expr
from plait.lang.state import ProgramState
from plait.lang.tools.generating import CallForm
from plait.lang.writing import Writing, _name, no_offset
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

W = TypeVar("W", bound="TapeWriting")


class TapeWriting(Writing):
    """What both kinds of states do alike."""

    _strand: TapeStrand

    @property
    def _tape(self) -> Tape:
        return self._strand.run

    def __iadd__(self: W, other: str | Expr) -> W:
        record(as_expr(other), self._strand)
        return self

    def _append(self, expr: Expr) -> None:
        record(expr, self._strand)

    def set_var(self, name: str, value: Any) -> None:
        self._strand.set_known(_name(name), value)

    __setitem__ = set_var

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        strand, start = self._strand, len(self._strand.segments)
        strand._note(BeginScope, _name(name))
        yield
        number, inside = strand._note(EndScope, name), strand.segments[start:]
        if all(isinstance(segment, Written) for segment in inside):
            strand.set(name, Known("".join(segment.text() for segment in inside)))
        else:
            strand.set(name, Later.of_call(strand.run, strand.lane, number, name))

    def _kept(self, said: str, node: int) -> NotKnown:
        """What step `node` gives a body to read."""

        def evaluate(env: Env) -> Any:
            return env.kept(node)

        return NotKnown(self._tape.marks, said, frozenset([Result(node, None)]), evaluate)

    def _reads(self, what: Literal["text", "messages", "usage"]) -> Any:
        self._note_read()
        return self._kept(f"the {what} of s", self._strand._note(Read, what))

    def _text_of(self, name: str | Typed[Any], variable: Readable) -> Any:
        if isinstance(name, Typed):
            _check_handle(name, variable)
        if isinstance(variable, Later):
            return variable.whole()
        return variable.text()

    def _called(self, name: str, variable: Readable) -> Any:
        if not isinstance(variable, Later) or not isinstance(variable.form, CallForm):
            raise InputError(f"variable {name!r} is no call: it does not come from gen({name!r}, tools=[...])")
        self._note_read()
        return self._kept(f"s.call({name!r})", self._strand._note(RunTool, name))

    def _ends(self, name: str | None) -> None:
        self._strand._note(End, name)
        if name is None:
            self._strand.close("this text was cancelled")

    def _note_read(self) -> None:
        self._tape.read.add(self._strand.lane)


class TapeState(TapeWriting, ProgramState):
    """The state of a plain body."""

    _strand: TapeStrand

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, Typed):
            variable = self._variable(str(name.name))
            _check_handle(name, variable)
            return variable.value()
        return self.get_var(name)

    def text_of(self, name: str | Typed[Any]) -> Any:
        return self._text_of(name, self._variable(str(name.name if isinstance(name, Typed) else name)))

    def text(self) -> Any:
        return self._reads("text")

    def messages(self) -> Any:
        return self._reads("messages")

    @property
    def usage(self) -> Any:
        return self._reads("usage")

    def sync(self) -> None:
        self._note_read()

    def text_iter(self, var_name: str | None = None) -> Iterator[Any]:
        yield self.text() if var_name is None else self.text_of(var_name)

    def call(self, name: str) -> Any:
        return self._called(name, self._variable(name))

    def fork(self, size: int = 1, position_ids_offset: object = None) -> TapeGroup:
        no_offset(position_ids_offset)
        strands, number = _forked(self._strand, size)
        group = TapeGroup([TapeState(strand) for strand in strands], self)
        self._tape.watch(number, [group, *group.states])
        return group

    def cancel(self) -> None:
        self._ends(None)

    def abort(self, name: str | None = None) -> None:
        if name is not None:
            self._variable(name)
        self._ends(name)

    def show(self, path: str | Path | None = None) -> Path:
        raise InputError("compile: nothing has run yet that could be shown")

    def __str__(self) -> str:
        return f"ProgramState({self.text()})"


class AsyncTapeState(TapeWriting, AsyncState):
    """The state of an async body."""

    _strand: TapeStrand

    async def get_var(self, name: str | Typed[Any]) -> Any:
        variable = await self._variable(str(name.name) if isinstance(name, Typed) else name)
        if isinstance(name, Typed):
            _check_handle(name, variable)
        return variable.value()

    async def text_of(self, name: str | Typed[Any]) -> Any:
        return self._text_of(name, await self._variable(str(name.name if isinstance(name, Typed) else name)))

    async def text(self) -> Any:
        return self._reads("text")

    async def messages(self) -> Any:
        return self._reads("messages")

    async def usage(self) -> Any:
        return self._reads("usage")

    async def sync(self) -> None:
        self._note_read()

    async def stream(self, name: str | None = None) -> AsyncIterator[Any]:
        yield await (self.text() if name is None else self.text_of(name))

    text_async_iter = stream

    async def call(self, name: str) -> Any:
        return self._called(name, await self._variable(name))

    def fork(self, size: int = 1, position_ids_offset: object = None) -> AsyncTapeGroup:
        no_offset(position_ids_offset)
        strands, number = _forked(self._strand, size)
        group = AsyncTapeGroup([AsyncTapeState(strand) for strand in strands], self)
        self._tape.watch(number, [group, *group.states])
        return group

    def cancel(self) -> None:
        self._ends(None)

    def abort(self, name: str | None = None) -> None:
        self._ends(name)


def _forked(strand: TapeStrand, size: int) -> tuple[list[TapeStrand], int]:
    """The branches, and the number of the step."""
    children = cast("list[TapeStrand]", strand.fork(size))
    return children, strand._note(ForkInto, tuple(child.lane for child in children))


def _check_handle(handle: Typed[Any], variable: Readable) -> None:
    """As a run would: the variable must be what this very gen gave."""
    if not isinstance(variable, Later) or variable.form is not handle.form or variable.n > 1:
        raise InputError(
            f"variable {handle.name!r} is not what this gen gave, but was set anew, joined or sampled n times; "
            f"read s[{handle.name!r}]"
        )
