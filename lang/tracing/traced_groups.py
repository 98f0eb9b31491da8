"""The groups of branches in a body that is being compiled: forks, joins and races are recorded as steps."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, NoReturn, cast

from plait.lang.aio.pending_read import Done
from plait.lang.aio.state import AsyncStateGroup
from plait.lang.core.fork_group import ForkGroup, JoinMode
from plait.lang.core.results import AssignedValue
from plait.lang.core.state import ProgramStateGroup
from plait.lang.tracing.nodes import Adopt, Join
from plait.lang.tracing.traced_result import TracedResult
from plait.lang.tracing.traced_run import TracedBranch, TracedRun
from plait.lang.tracing.traced_value import TracedValue
from plait.runtime.errors import InputError


class _TracedJoin(ForkGroup[Any]):
    """The part shared by the groups of plain and async bodies."""

    winners: int | None = None

    def _trace_join(self, mode: JoinMode) -> None:
        self._begin_join(mode)
        source: TracedBranch = self.src_state._branch
        source._add_step(Join, self._lanes(), mode, self.winners)
        for state in self.states:
            source.run.read_lanes.add(state._branch.lane)
        if self.winners is not None:
            self._join_winners(mode, source, self.winners)
        elif mode == "gather_variable":
            self._gather()
        else:
            self._append_texts()

    def _join_winners(self, mode: JoinMode, source: TracedBranch, winners: int) -> None:
        """Sets the variables that all branches have. Which branches won is known at run time only."""
        if mode != "gather_variable":
            raise InputError("compile: the winners of a race are not known, so only their variables can be joined")
        names = [set(state._branch.variables) - self._names_before_fork for state in self.states]
        number = len(source.run.nodes) - 1
        for name in set.intersection(*names):
            source.variables[name] = TracedResult.of_call(source.run, source.lane, number, name, winners)

    def _trace_adopt(self, index: int) -> None:
        winner = self.states[index]
        self._begin_join("concate_and_append")
        source = cast(TracedBranch, self.src_state._branch)
        source._add_step(Adopt, self._lanes(), self.states.index(winner))
        for state in self.states:
            source.run.read_lanes.add(state._branch.lane)
        self._take_over(winner)

    def _lanes(self) -> tuple[int, ...]:
        return tuple(state._branch.lane for state in self.states)

    def _gather(self) -> None:
        gathered: dict[str, list[Any]] = {}
        for state in self.states:
            for name, variable in state._branch.variables.items():
                if name not in self._names_before_fork:
                    values = gathered.setdefault(name, [])
                    values.append(_relabel(variable.value(), f"s[{name!r}][{len(values)}]"))
        self.src_state._branch.variables.update({name: AssignedValue(values) for name, values in gathered.items()})


class TracedGroup(_TracedJoin, ProgramStateGroup):
    """The branches of a plain body."""

    def join(self, mode: JoinMode = "gather_variable") -> None:
        self._trace_join(mode)

    def adopt(self, index: int) -> None:
        self._trace_adopt(index)

    def _traced_race(self, first: int) -> TracedGroup:
        raced = _TracedRaceGroup(self.states, self.src_state, self)
        raced.winners = first
        return raced


class AsyncTracedGroup(_TracedJoin, AsyncStateGroup):
    """The branches of an async body."""

    def join(self, mode: JoinMode = "gather_variable") -> Awaitable[None]:
        self._trace_join(mode)
        return Done()

    async def adopt(self, index: int) -> None:
        self._trace_adopt(index)

    def _traced_race(self, first: int) -> Any:
        raced = _AsyncTracedRaceGroup(self.states, self.src_state, self)
        raced.winners = first

        async def done() -> AsyncTracedGroup:
            return raced

        return done()


class _TracedRaceWinners(_TracedJoin):
    def _refuse(self) -> NoReturn:
        traced_run: TracedRun = self.src_state._traced_run
        traced_run.placeholders.refuse("which branch wins a race is known at run time only; join the race")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __iadd__(self, other: Any) -> NoReturn:
        self._refuse()


class _TracedRaceGroup(_TracedRaceWinners, TracedGroup):
    """The winners of a race in a plain body; only their number is known."""


class _AsyncTracedRaceGroup(_TracedRaceWinners, AsyncTracedGroup):
    """The winners of a race in an async body; only their number is known."""


def _relabel(value: Any, label: str) -> Any:
    """Returns the value of a branch with the source text that it has after the join."""
    return replace(value, _label=label) if isinstance(value, TracedValue) else value
