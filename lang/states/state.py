"""`ProgramState`, the `s` of a program's body and the result of `run`; `ProgramStateGroup`, its forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

from plait.lang.core.expressions import T, Typed
from plait.lang.core.tool_use.tool_calls import ToolResult
from plait.lang.states.fork_group import ForkGroup, JoinMode
from plait.lang.states.state_reader import StateReader


class ProgramState(StateReader):
    """The growing text of a program, and its variables.

    >>> s += "The capital of France is" + gen("city", max_tokens=4)     # doctest: +SKIP
    >>> s["city"]                                                       # doctest: +SKIP
    ' Paris.'
    """

    @overload
    def __getitem__(self, name: Typed[T]) -> T: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: str | Typed[Any]) -> Any:
        """`s["x"]` is `get_var("x")`. `s[p]` is the typed value of `p`, a typed gen that was appended."""
        with self._marking_handled_errors():
            return self._variable(name).value()

    def fork(self, size: int = 1, position_ids_offset: object = None) -> ProgramStateGroup:
        """Returns `size` states that continue this text in parallel. The text so far is shared, not recomputed.

        >>> forks = s.fork(3)                                           # doctest: +SKIP
        >>> forks += lambda i: f"Tip {i + 1}:" + gen("tip")             # doctest: +SKIP
        >>> forks.join(); s["tip"]                                      # doctest: +SKIP
        [..., ..., ...]
        """
        return ProgramStateGroup(self._forks(size, position_ids_offset), self)

    @contextmanager
    def copy(self, position_ids_offset: object = None) -> Iterator[ProgramState]:
        """A fork of one branch for the length of a block: `with s.copy() as t: t += ...`. It is joined at the end of
        the block: each of its new variables becomes a list of one value here."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0]._branch.close("an exception ended the block of this copy")
            raise
        group.join()

    def call(self, name: str, timeout: float | None = None) -> ToolResult | None:
        """Runs the tool that `gen(name, tools=...)` called, and appends its result for the model.

        If the tool raises, the model gets the error as its result; see `result.error`. Returns None if the model made
        no call (`tool_choice="auto"`). An `async def` tool is run to its end.

        `timeout`, in seconds: afterwards the error is a TimeoutError. The tool then runs in a thread. A plain function
        goes on there, since Python cannot stop it.

        >>> s += assistant(gen("step", tools=[search, add]))            # doctest: +SKIP
        >>> s.call("step").value                                        # doctest: +SKIP
        3
        """
        with self._marking_handled_errors():
            return self._branch.call_tool(name, self._variable(name), timeout)

    def tool_result(self, name: str, value: Any) -> ToolResult:
        """Appends `value` as the result of the call that `gen(name, tools=...)` made. For tools without a function,
        whose calls the program runs itself. Raises InputError if the model made no call.

        >>> s.tool_result("step", {"degrees": 21.5})                    # doctest: +SKIP
        """
        with self._marking_handled_errors():
            return self._branch.append_tool_result(name, self._variable(name), value)

    def abort(self, name: str | None = None) -> None:
        """Ends the call of variable `name`, or the whole program, at once. Reading the missing values afterwards raises
        ProgramError."""
        self._branch.abort_variable(name, None if name is None else self._variable(name))

    @overload
    def show(self, path: str | Path) -> Path: ...
    @overload
    def show(self, path: None = None) -> Path | None: ...
    def show(self, path: str | Path | None = None) -> Path | None:
        """Waits for the program and writes a trace of its calls: an HTML page (.html) or a Perfetto trace (.json).
        Returns the path. Without `path` it is shown in the notebook, and None returned; outside a notebook the page is
        opened in a browser. It has a row for each call, below its branch, over time; a click shows texts and tokens."""
        from plait.lang.display.export import show  # lazy: few programs need it

        self._run.check_has_run()
        self._wait_for_body()
        return show(self._run, path)

    def __str__(self) -> str:
        """`ProgramState(<the text>)`; waits like `text()`."""
        return f"ProgramState({self.text()})"


class ProgramStateGroup(ForkGroup[ProgramState]):
    """The branches that `s.fork(n)` returns.

    >>> forks = s.fork(2)                                                   # doctest: +SKIP
    >>> forks += lambda i: gen("draft", temperature=0.2 + i)                # doctest: +SKIP
    >>> forks.join()                                                        # doctest: +SKIP
    """

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Brings the results of the branches to the state that was forked.

        "gather_variable": each new variable of the branches becomes a list of their values, in order.
        "concate_and_append": the text that each branch added is appended, in order.
        Nothing waits: values and texts may still be generated. A read waits for them, and raises the ProgramError of a
        branch that failed. Afterwards the branches can be read but not extended.
        """
        self._join(mode)

    def adopt(self, index: int) -> None:
        """Continues the forked state as branch `index`: appends its text and takes over its variables. The other
        branches end."""
        winner = self._begin_adopt(index)
        winner.sync()
        self._take_over(winner)
