"""Counts the calls that a program can have in flight at once, from its steps, before it runs.

A gen with `particles` or `exact` counts as the rows of a batch that it can occupy.

A call is in flight while it runs or waits for a place in a batch. A session has at most one: its calls run in order. A
program starts calls without waiting for earlier ones, so the calls of a fork's branches, and the samples of a gen, may
still be in flight when later steps start theirs. They have ended for certain after a `var` of the last call of their
session, and after a fork with "append", which waits for the texts of its branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from plait.runtime.programs.variables import gather_variables
from plait.runtime.server.protocols.programs.compiler import (
    ForkStep,
    GenStep,
    SelectStep,
    Step,
    VariableStep,
)


class CallOfSession(NamedTuple):
    """A call, as the number of its session and its number among the calls of that session."""

    session: int
    call: int


VariableCalls: TypeAlias = "CallOfSession | list[VariableCalls] | None"  # None: a text of the request


def max_calls_in_flight(steps: Sequence[Step], variables: Mapping[str, object]) -> int:
    """The greatest number of calls that the steps can have in flight at once; never too low."""
    known: dict[str, VariableCalls] = {
        name: [None] * len(value) if isinstance(value, list) else None for name, value in variables.items()
    }
    return _CallCounter().count(steps, known)


@dataclass
class _Branch:
    """A branch while its steps are counted.

    active: the sessions that may have a call in flight, of this branch and its forks. most: the greatest number of them
    so far. ended: sessions of the branches around this one of which it has waited for the last call.
    """

    session: int
    variables: dict[str, VariableCalls]
    active: set[int] = field(default_factory=set)
    most: int = 0
    ended: set[int] = field(default_factory=set)


class _CallCounter:
    def __init__(self) -> None:
        self._num_sessions = 0
        self._num_calls: Counter[int] = Counter()  # of each session, so far
        self._num_rows: dict[int, int] = {}  # of each session: the most of one of its calls, so far

    def count(self, steps: Sequence[Step], variables: dict[str, VariableCalls]) -> int:
        main = _Branch(self._new_session(), variables)
        self._run(steps, main)
        return main.most

    def _new_session(self) -> int:
        self._num_sessions += 1
        return self._num_sessions

    def _run(self, steps: Sequence[Step], branch: _Branch) -> None:
        for step in steps:
            if isinstance(step, GenStep | SelectStep):
                self._call(step, branch)
            elif isinstance(step, ForkStep):
                self._fork(step, branch)
            elif isinstance(step, VariableStep):
                self._wait_for(step, branch)

    def _call(self, step: GenStep | SelectStep, branch: _Branch) -> None:
        num_samples = step.n if isinstance(step, GenStep) else 1
        sessions = [branch.session, *(self._new_session() for _ in range(num_samples - 1))]
        self._num_calls.update(sessions)
        num_rows = step.sampling.max_rows if isinstance(step, GenStep) else 1
        self._num_rows |= {session: max(num_rows, self._num_rows.get(session, 1)) for session in sessions}
        branch.active.update(sessions)
        branch.most = max(branch.most, self._count_rows(branch.active))
        if step.name is not None:
            calls: list[VariableCalls] = [CallOfSession(session, self._num_calls[session]) for session in sessions]
            branch.variables[step.name] = calls if num_samples > 1 else calls[0]

    def _count_rows(self, sessions: set[int]) -> int:
        return sum(self._num_rows[session] for session in sessions)

    def _wait_for(self, step: VariableStep, branch: _Branch) -> None:
        value = branch.variables[step.name]
        for index in step.index:
            assert isinstance(value, list)
            value = value[index]
        if isinstance(value, CallOfSession) and value.call == self._num_calls[value.session]:
            branch.active.discard(value.session)
            branch.ended.add(value.session)

    def _fork(self, step: ForkStep, branch: _Branch) -> None:
        """Counts the branches side by side. Their calls start when the calls of `branch` before the fork have ended."""
        children = [_Branch(self._new_session(), dict(branch.variables)) for _ in step.branches]
        for child_steps, child in zip(step.branches, children, strict=True):
            self._run(child_steps, child)
        most_of_children = sum(child.most for child in children)
        branch.most = max(branch.most, self._count_rows(branch.active - {branch.session}) + most_of_children)
        if most_of_children:
            branch.active.discard(branch.session)
        for child in children:
            branch.active -= child.ended
            branch.ended |= child.ended
        for child in children:
            branch.active |= child.active - ({child.session} if step.join == "append" else set())
        if step.join == "gather":
            branch.variables |= gather_variables(branch.variables, [child.variables for child in children])
