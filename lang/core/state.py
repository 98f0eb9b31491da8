"""What a program's body holds as `s`, and what `run` gives back: a handle on one strand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from plait.lang.core.expressions import Expr, T, Typed, as_expr
from plait.lang.core.fork_group import ForkGroup, JoinMode
from plait.lang.core.interpreter import execute
from plait.lang.core.state_reader import StateReader
from plait.lang.core.state_writer import StateWriter, reject_position_ids_offset
from plait.lang.core.tool_calls import ToolResult, call_tool

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

P = TypeVar("P", bound="ProgramState")


class ProgramState(StateWriter, StateReader):
    """The growing text of a program, and its variables.

    >>> s += "The capital of France is" + gen("city", max_tokens=4)     # doctest: +SKIP
    >>> s["city"]                                                       # doctest: +SKIP
    ' Paris.'
    """

    def __init__(self, branch: Branch, *, is_external: bool = False) -> None:
        StateReader.__init__(self, branch, is_external)

    def __iadd__(self: P, other: str | Expr) -> P:
        """Appends text or an expression. Returns at once; the calls run in the runtime."""
        execute(as_expr(other), self._branch)
        return self

    @overload
    def __getitem__(self, name: Typed[T]) -> T: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: str | Typed[Any]) -> Any:
        """`s["x"]` is `get_var("x")`. `s[p]`, of a typed gen `p` that was appended, is its value, typed."""
        if not isinstance(name, Typed):
            return self.get_var(name)
        with self._marking_handled_errors():
            return self._typed_variable(name).value()

    def fork(self, size: int = 1, position_ids_offset: object = None) -> ProgramStateGroup:
        """`size` states that go on from this text side by side; the text so far is shared, not recomputed.

        >>> forks = s.fork(3)                                           # doctest: +SKIP
        >>> forks += lambda i: f"Tip {i + 1}:" + gen("tip")             # doctest: +SKIP
        >>> forks.join(); s["tip"]                                      # doctest: +SKIP
        [..., ..., ...]
        """
        reject_position_ids_offset(position_ids_offset)
        return ProgramStateGroup([ProgramState(branch) for branch in self._branch.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: object = None) -> Iterator[ProgramState]:
        """One branch for a side thought: `with s.copy() as t: t += ...`. It is joined at the end, so that its
        new variables are here as lists of one value."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0]._branch.close("this copy was left by an exception")
            raise
        group.join()

    def call(self, name: str) -> ToolResult | None:
        """Runs the tool that `gen(name, tools=...)` called and appends its result for the model to read.

        What the tool raises is told to the model too: `result.error`. None: with `tool_choice="auto"` the model
        called nothing. A tool that is `async def` is run to its end.

        >>> s += assistant(gen("step", tools=[search, add]))            # doctest: +SKIP
        >>> s.call("step").value                                        # doctest: +SKIP
        3
        """
        with self._marking_handled_errors():
            return call_tool(self._branch, name, self._variable(name))

    def cancel(self) -> None:
        """Ends this text at once: its calls, and those of its branches. Inside the body the program goes on without
        it; outside, the program ends. What is read of it afterwards raises."""
        if self._is_external:
            self._run.abort()
        else:
            self._branch.cancel("this text was cancelled")

    def abort(self, name: str | None = None) -> None:
        """Ends the call of variable `name`, or the whole program, at once; what is read afterwards raises."""
        if name is None:
            self._run.abort()
        else:
            self._variable(name).abort()

    def show(self, path: str | Path | None = None) -> Path:
        """Writes what the program did as a page (.html) or a Perfetto trace (.json), once it is done; the path. Without
        one, a page is opened in the browser. A lane for each branch, time across, text and tokens on hover."""
        from plait.lang.spans.export import show  # a browser and all that, which few programs need

        self._wait_for_body()
        return show(self._run, path)

    def _repr_html_(self) -> str:
        """The text for a notebook, what was generated marked."""
        from plait.lang.spans.export import as_html

        return as_html(self._branch)

    def __str__(self) -> str:
        """`ProgramState(<the text>)`; waits like `text()`."""
        return f"ProgramState({self.text()})"


class ProgramStateGroup(ForkGroup[ProgramState]):
    """What `s.fork(n)` gives.

    >>> forks = s.fork(2)                                                   # doctest: +SKIP
    >>> forks += lambda i: gen("draft", temperature=0.2 + i)                # doctest: +SKIP
    >>> forks.join()                                                        # doctest: +SKIP
    """

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Waits for the branches and brings what they have to the state they came from.

        "gather_variable": each variable new in a branch becomes a list of the branches' values, in order.
        "concate_and_append": the text that each branch added is appended, in order.
        Afterwards the branches can be read but not extended. Raises the ProgramError of a branch that failed.
        """
        self._begin_join(mode)
        for state in self.states:
            state.sync()
        self._finish_join(mode)

    def adopt(self, index: int) -> None:
        """Goes on as branch `index`: its text is appended to the state they came from, its variables are that state's.
        The other branches end."""
        winner = self.states[index]
        self._begin_join("concate_and_append")
        for state in self.states:
            if state is not winner:
                state._branch.cancel("another branch was adopted")
        winner.sync()
        source = self.src_state._branch
        source.append_from_child(winner._branch, self._fork_position, self._num_turns_at_fork)
        source.variables.update(winner._branch.variables)
