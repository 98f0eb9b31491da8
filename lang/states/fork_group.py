"""`ForkGroup`: the branches of a fork, which are written together and joined again. For plain and async programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from plait.lang.core.expressions import Expr
from plait.lang.display.texts import forks_html, states_html
from plait.lang.html.render import ShownList
from plait.lang.states.base_state import BaseState
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.runtime.programs.branch import ForkPoint

JoinMode = Literal["gather_variable", "concate_and_append"]


S = TypeVar("S", bound=BaseState)
G = TypeVar("G", bound="ForkGroup[Any]")


class ForkGroup(Generic[S]):
    """The n states of a fork, in order. They are written one by one (`forks[i] += ...`) or together (`forks +=
    ...`)."""

    def __init__(self, states: Sequence[S], source: S, raced_group: ForkGroup[S] | None = None) -> None:
        """`raced_group`: for the winners of a race, the group they were part of. That group can no longer be joined."""
        self.states = list(states)
        self.src_state = source
        self._branches = [state._branch for state in self.states]
        self._fork_point: ForkPoint = source._branch.fork_point() if raced_group is None else raced_group._fork_point
        self.num_winners: int | None = None  # while a race is compiled: how many of the branches the joined ones are
        self._closed_reason: str | None = None
        if raced_group is not None:
            raced_group._closed_reason = "these branches ran a race: join the group that race(...) returned"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.states)} branches of {self.src_state!r}>"

    def _repr_html_(self) -> str:
        """Returns the branches side by side as HTML for notebooks, as far as their texts are there."""
        self.src_state._run.check_has_run()
        return forks_html(self.src_state._branch, self._branches, self._fork_point.num_segments)

    def cancel(self) -> None:
        """Ends the calls of all branches at once; see `cancel` of a state. The program continues without them."""
        for state in self.states:
            state.cancel()

    def _begin_join(self, mode: JoinMode) -> None:
        if mode not in ("gather_variable", "concate_and_append"):
            raise InputError(f'join takes "gather_variable" or "concate_and_append", not {mode!r}')
        if self._closed_reason is not None:
            raise InputError(self._closed_reason)
        self._closed_reason = "these branches were joined already"
        for branch in self._branches:
            branch.close("this branch was joined")  # takes effect after its calls

    def _join(self, mode: JoinMode) -> None:
        """Brings the results of the branches to the source state. The calls of the branches may still run."""
        self._begin_join(mode)
        self.src_state._branch.join(self._branches, mode, self._fork_point, self.num_winners)

    def _begin_adopt(self, index: int) -> S:
        """Ends all branches but `index`, and returns that one."""
        winner = self.states[index]
        self._begin_join("concate_and_append")
        self.src_state._branch.begin_adopt(winner._branch, self._branches)
        return winner

    def _take_over(self, winner: S) -> None:
        """Appends the text of an adopted branch to the source state, and takes over its variables."""
        self.src_state._branch.take_over(winner._branch, self._fork_point)

    def __iadd__(self: G, other: str | Expr | Sequence[str | Expr] | Callable[[int], str | Expr]) -> G:
        """Appends to every branch: the same text or expression, the items of a list (one per branch), or `other(i)`."""
        for state, item in zip(self.states, self._item_per_branch(other), strict=True):
            state += item
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
        return ShownList(states_html, self.states[index]) if isinstance(index, slice) else self.states[index]

    def __setitem__(self, index: int, state: S) -> None:
        """Exists for `forks[i] += ...` only. A branch cannot be replaced by another state."""
        if self.states[index] is not state:
            raise InputError("a branch cannot be replaced; append to it with forks[i] += ...")

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)
