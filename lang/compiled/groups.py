"""The branches of a fork in a body that is being compiled, and what is known of them once they are joined or raced.

Knows: groups and tape. Must not know: what else a state can do, who runs the body.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, cast

from plait.lang.aio.group import AsyncStateGroup
from plait.lang.answers import Known
from plait.lang.compiled.later import Later
from plait.lang.compiled.nodes import Adopt, Join
from plait.lang.compiled.tape import Tape, TapeStrand
from plait.lang.compiled.unknown import NotKnown
from plait.lang.group import Group, JoinMode, ProgramStateGroup
from plait.runtime.errors import InputError


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


def _called_now(value: Any, said: str) -> Any:
    """A branch's value under the name that it has once the branches are joined."""
    return replace(value, _said=said) if isinstance(value, NotKnown) else value
