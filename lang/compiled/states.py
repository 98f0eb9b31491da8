"""What a body that is being compiled holds as `s`: states and groups whose reads give unknown values.

Knows: handles and what they may do. Must not know: how a graph is checked or shown, who runs the body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

from plait.lang.aio.group import AsyncStateGroup
from plait.lang.aio.state import AsyncState
from plait.lang.answers import Known, Readable, Written
from plait.lang.compiled.nodes import Adopt, BeginScope, End, EndScope, ForkInto, Join, Read, RunTool
from plait.lang.compiled.tape import Later, Tape, TapeStrand, record
from plait.lang.compiled.unknown import Env, NotKnown, Result
from plait.lang.expressions import Expr, Typed, as_expr
from plait.lang.group import Group, JoinMode, ProgramStateGroup
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


class _TapeJoining(Group[Any]):
    """What both kinds of groups do alike."""

    winners: int | None = None

    def _joined(self, mode: JoinMode) -> None:
        self._begin_join(mode)
        source: TapeStrand = self.src_state._strand
        source._note(Join, self._numbers(), mode, self.winners)
        for state in self.states:
            source.run.read.add(state._strand.lane)
        if self.winners is not None:
            self._join_winners(mode, source, self.winners)
        elif mode == "gather_variable":
            self._gather()
        else:
            self._finish_join(mode)

    def _join_winners(self, mode: JoinMode, source: TapeStrand, winners: int) -> None:
        """Which branches they are is not known; what all of them have is."""
        if mode != "gather_variable":
            raise InputError("compile: the texts of a race's winners are not known; join their variables instead")
        names = [set(state._strand.variables) - self._names_before for state in self.states]
        number = len(source.run.nodes) - 1
        for name in set.intersection(*names):
            source.variables[name] = Later.of_call(source.run, source.lane, number, name, winners)

    def _numbers(self) -> tuple[int, ...]:
        return tuple(state._strand.lane for state in self.states)

    def _gather(self) -> None:
        gathered: dict[str, list[Any]] = {}
        for state in self.states:
            for name, variable in state._strand.variables.items():
                if name not in self._names_before:
                    values = gathered.setdefault(name, [])
                    values.append(_called_now(variable.value(), f"s[{name!r}][{len(values)}]"))
        self.src_state._strand.variables.update({name: Known(values) for name, values in gathered.items()})


class TapeGroup(_TapeJoining, ProgramStateGroup):
    """The branches of a plain body."""

    def join(self, mode: JoinMode = "gather_variable") -> None:
        self._joined(mode)

    def adopt(self, index: int) -> None:
        winner = self.states[index]
        self._begin_join("concate_and_append")
        source = cast(TapeStrand, self.src_state._strand)
        source._note(Adopt, self._numbers(), self.states.index(winner))
        for state in self.states:
            source.run.read.add(state._strand.lane)
        source.append_tail(winner._strand, self._start, self._num_turns)
        source.variables.update(winner._strand.variables)

    def _raced(self, first: int) -> TapeGroup:
        raced = _RacedGroup(self.states, self.src_state, self)
        raced.winners = first
        return raced


class AsyncTapeGroup(_TapeJoining, AsyncStateGroup):
    """The branches of an async body."""

    async def join(self, mode: JoinMode = "gather_variable") -> None:
        self._joined(mode)

    def _raced(self, first: int) -> Any:
        raced = _AsyncRacedGroup(self.states, self.src_state, self)
        raced.winners = first

        async def done() -> AsyncTapeGroup:
            return raced

        return done()


class _Raced(_TapeJoining):
    def _refused(self) -> NoReturn:
        tape: Tape = self.src_state._tape
        tape.marks.refuse("which branch won a race is something that only a run knows; join the race")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refused()

    def __iter__(self) -> NoReturn:
        self._refused()

    def __iadd__(self, other: Any) -> NoReturn:
        self._refused()


class _RacedGroup(_Raced, TapeGroup):
    """The winners of a race: only their number is known."""


class _AsyncRacedGroup(_Raced, AsyncTapeGroup):
    """The winners of a race: only their number is known."""


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


def _called_now(value: Any, said: str) -> Any:
    """A branch's value under the name that it has once the branches are joined."""
    return replace(value, _said=said) if isinstance(value, NotKnown) else value
