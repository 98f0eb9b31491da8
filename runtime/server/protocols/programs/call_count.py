"""Counts the calls that a program can have in flight at once, while its steps are compiled.

A gen with `particles` or `exact` counts as the rows of a batch that it can occupy.

A call is in flight while it runs or waits for a place in a batch. A session has at most one: its calls run in order. A
program starts calls without waiting for earlier ones, so the calls of a fork's branches, and the samples of a gen, may
still be in flight when later steps start theirs. They have ended for certain after a `var` of the last call of their
session, and after a fork with "append", which waits for the texts of its branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from plait.runtime.programs.variables import gather_variables


class CallOfSession(NamedTuple):
    """A call, as the number of its session and its number among the calls of that session."""

    session: int
    call: int


VariableCalls: TypeAlias = "CallOfSession | list[VariableCalls] | None"  # None: a text of the request


@dataclass
class BranchCalls:
    """A branch while its steps are counted.

    variables: those that are set so far; a list has several values. active: the sessions that may have a call in
    flight, of this branch and its forks. most: the greatest number of them so far. ended: sessions of the branches
    around this one of which it has waited for the last call.
    """

    session: int
    variables: dict[str, VariableCalls]
    active: set[int] = field(default_factory=set)
    most: int = 0
    ended: set[int] = field(default_factory=set)


class CallCounter:
    """The greatest number of calls in flight, never too low, is `most` of the program's own branch at its end."""

    def __init__(self) -> None:
        self._num_sessions = 0
        self._num_calls: Counter[int] = Counter()  # of each session, so far
        self._num_rows: dict[int, int] = {}  # of each session: the most of one of its calls, so far

    def open_branch(self, variables: dict[str, VariableCalls]) -> BranchCalls:
        """Returns a branch with a session of its own."""
        return BranchCalls(self._new_session(), dict(variables))

    def _new_session(self) -> int:
        self._num_sessions += 1
        return self._num_sessions

    def add_call(self, branch: BranchCalls, name: str | None, num_samples: int = 1, num_rows: int = 1) -> None:
        """Counts a call, and sets variable `name`. `num_rows`: those of a batch that a sample can occupy."""
        sessions = [branch.session, *(self._new_session() for _ in range(num_samples - 1))]
        self._num_calls.update(sessions)
        self._num_rows |= {session: max(num_rows, self._num_rows.get(session, 1)) for session in sessions}
        branch.active.update(sessions)
        branch.most = max(branch.most, self._count_rows(branch.active))
        if name is not None:
            calls: list[VariableCalls] = [CallOfSession(session, self._num_calls[session]) for session in sessions]
            branch.variables[name] = calls if num_samples > 1 else calls[0]

    def _count_rows(self, sessions: set[int]) -> int:
        return sum(self._num_rows[session] for session in sessions)

    def wait_for(self, branch: BranchCalls, value: VariableCalls) -> None:
        """Counts that the branch waits for a text."""
        if isinstance(value, CallOfSession) and value.call == self._num_calls[value.session]:
            branch.active.discard(value.session)
            branch.ended.add(value.session)

    def join(self, branch: BranchCalls, children: Sequence[BranchCalls], mode: Literal["gather", "append"]) -> None:
        """Counts the branches of a fork side by side. Their calls start when those of `branch` before it have ended."""
        most_of_children = sum(child.most for child in children)
        branch.most = max(branch.most, self._count_rows(branch.active - {branch.session}) + most_of_children)
        if most_of_children:
            branch.active.discard(branch.session)
        for child in children:
            branch.active -= child.ended
            branch.ended |= child.ended
        for child in children:
            branch.active |= child.active - ({child.session} if mode == "append" else set())
        if mode == "gather":
            branch.variables |= gather_variables(branch.variables, [child.variables for child in children])
