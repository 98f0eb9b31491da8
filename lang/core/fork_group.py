"""`ForkGroup`: the branches of a fork, which are written together and joined again. For plain and async programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from plait.lang.core.expressions import Expr, as_expr
from plait.lang.core.joined_values import JoinedValues
from plait.lang.core.results import Segment
from plait.lang.core.state_writer import StateWriter
from plait.runtime.errors import InputError

JoinMode = Literal["gather_variable", "concate_and_append"]


S = TypeVar("S", bound=StateWriter)
G = TypeVar("G", bound="ForkGroup[Any]")


class ForkGroup(Generic[S]):
    """The n states of a fork, in order. They are written one by one (`forks[i] += ...`) or together (`forks +=
    ...`)."""

    def __init__(self, states: Sequence[S], source: S, raced_group: ForkGroup[S] | None = None) -> None:
        """`raced_group`: for the winners of a race, the group they were part of. That group can no longer be joined."""
        self.states = list(states)
        self.src_state = source
        self._names_before_fork: frozenset[str] = (
            raced_group._names_before_fork if raced_group is not None else frozenset(source._branch.variables)
        )
        self._fork_position: int = (
            raced_group._fork_position if raced_group is not None else len(source._branch.segments)
        )
        self._num_turns_at_fork: int = (
            raced_group._num_turns_at_fork if raced_group is not None else len(source._branch.turns)
        )
        self._closed_reason: str | None = None
        if raced_group is not None:
            raced_group._closed_reason = "these branches ran a race: join the group that race(...) returned"

    def _traced_race(self, first: int) -> Any:
        """Returns the winners while the program is being compiled, where no branch computes anything; otherwise
        None."""
        return None

    def _begin_join(self, mode: JoinMode) -> None:
        if mode not in ("gather_variable", "concate_and_append"):
            raise InputError(f'join takes "gather_variable" or "concate_and_append", not {mode!r}')
        if self._closed_reason is not None:
            raise InputError(self._closed_reason)
        self._closed_reason = "these branches were joined already"
        for state in self.states:
            state._branch.close("this branch was joined")  # takes effect after its calls

    def _join(self, mode: JoinMode) -> None:
        """Brings the results of the branches to the source state. The calls of the branches may still run."""
        self._begin_join(mode)
        for state in self.states:
            self.src_state._branch.take_calls_of(state._branch)
        if mode == "gather_variable":
            self._gather()
        else:
            self._append_texts()

    def _begin_adopt(self, index: int) -> S:
        """Ends all branches but `index`, and returns that one."""
        winner = self.states[index]
        self._begin_join("concate_and_append")
        for state in self.states:
            if state is not winner:
                state._branch.cancel("another branch was adopted")
        return winner

    def _take_over(self, winner: S) -> None:
        """Appends the text of an adopted branch to the source state, and takes over its variables."""
        source = self.src_state._branch
        source.append_from_child(winner._branch, self._fork_position, self._num_turns_at_fork)
        source.variables.update(winner._branch.variables)

    def _append_texts(self) -> None:
        for state in self.states:
            self.src_state._branch.append_from_child(state._branch, self._fork_position, self._num_turns_at_fork)

    def _gather(self) -> None:
        source, gathered = self.src_state._branch, dict[str, list[Segment]]()
        for state in self.states:
            for name, variable in state._branch.variables.items():
                if name not in self._names_before_fork:
                    gathered.setdefault(name, []).append(variable)
        for name, variables in gathered.items():
            source.set(name, JoinedValues(variables))

    def __iadd__(self: G, other: str | Expr | Sequence[str | Expr] | Callable[[int], str | Expr]) -> G:
        """Appends to every branch: the same text or expression, the items of a list (one per branch), or `other(i)`."""
        for state, item in zip(self.states, self._item_per_branch(other), strict=True):
            state._append(as_expr(item))
        return self

    def _item_per_branch(self, other: Any) -> Sequence[Any]:
        if isinstance(other, (str, Expr)):
            return [other] * len(self.states)
        if isinstance(other, (list, tuple)):
            if len(other) != len(self.states):
                raise InputError(f"{len(other)} items cannot be appended to {len(self.states)} branches: give one each")
            return other
        if callable(other) and not hasattr(other, "run_batch"):
            return [other(i) for i in range(len(self.states))]
        raise InputError(
            "a group takes text, an expression, a list with one item per branch, or a function of the branch's "
            f"index, not {type(other).__name__}"
        )

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> list[S]: ...
    def __getitem__(self, index: int | slice) -> S | list[S]:
        if isinstance(index, str):
            raise InputError(f"a group has branches, not variables: read forks[i][{index!r}], or join() and read s")
        return self.states[index]

    def __setitem__(self, index: int, state: S) -> None:
        """Exists for `forks[i] += ...` only. A branch cannot be replaced by another state."""
        if self.states[index] is not state:
            raise InputError("a branch cannot be replaced; append to it with forks[i] += ...")

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)
