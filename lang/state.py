"""What a program's body holds as `s`, and what `run` gives back: a handle on one strand.

Knows: writing, forking and naming as SGLang's users spell it. Must not know: how nodes run, sockets, threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plait.lang.answers import Known, Span
from plait.lang.expressions import Expr, as_expr
from plait.lang.interpreter import execute
from plait.lang.reading import Reading
from plait.lang.tools.calling import ToolResult, call_tool
from plait.lang.turns import Turns
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.group import ProgramStateGroup
    from plait.lang.strand import Strand


class ProgramState(Turns, Reading):
    """The growing text of a program, and its variables.

    >>> s += "The capital of France is" + gen("city", max_tokens=4)     # doctest: +SKIP
    >>> s["city"]                                                       # doctest: +SKIP
    ' Paris.'
    """

    def __init__(self, strand: Strand, *, outside: bool = False) -> None:
        Reading.__init__(self, strand, outside)

    # -- writing ----------------------------------------------------------------------------------

    def __iadd__(self, other: str | Expr) -> ProgramState:
        """Appends text or an expression. Returns at once; calls go on in the runtime."""
        execute(as_expr(other), self._strand)
        return self

    def _append(self, expr: Expr) -> None:
        execute(expr, self._strand)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """`with s.var_scope("x"): s += ...`: the text appended inside is variable `name` once the scope ends."""
        start = len(self._strand.segments)
        yield
        self._strand.set(_name(name), Span(self._strand.segments[start:]))

    def fork(self, size: int = 1, position_ids_offset: object = None) -> ProgramStateGroup:
        """`size` states that go on from this text side by side; the text so far is shared, not recomputed.

        >>> forks = s.fork(3)                                           # doctest: +SKIP
        >>> forks += lambda i: f"Tip {i + 1}:" + gen("tip")             # doctest: +SKIP
        >>> forks.join(); s["tip"]                                      # doctest: +SKIP
        [..., ..., ...]
        """
        from plait.lang.group import ProgramStateGroup

        if position_ids_offset is not None:
            raise InputError("fork: position_ids_offset is not supported; every branch goes on where the text ends")
        return ProgramStateGroup([ProgramState(strand) for strand in self._strand.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: object = None) -> Iterator[ProgramState]:
        """One branch for a side thought: `with s.copy() as t: t += ...`. It is joined at the end, so that its
        new variables are here as lists of one value."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0]._strand.close("this copy was left by an exception")
            raise
        group.join()

    def set_var(self, name: str, value: Any) -> None:
        """Sets variable `name` to any object. The text does not change."""
        self._strand.set(_name(name), Known(value))

    __setitem__ = set_var

    def call(self, name: str) -> ToolResult | None:
        """Runs the tool that `gen(name, tools=...)` called and appends its result for the model to read.

        What the tool raises is told to the model too: `result.error`. None: with `tool_choice="auto"` the model
        called nothing. A tool that is `async def` is run to its end.

        >>> s += assistant(gen("step", tools=[search, add]))            # doctest: +SKIP
        >>> s.call("step").value                                        # doctest: +SKIP
        3
        """
        with self._body_may_handle():
            return call_tool(self._strand, name, self._variable(name))

    def abort(self, name: str | None = None) -> None:
        """Ends the call of variable `name`, or the whole program, at once; what is read afterwards raises."""
        if name is None:
            self._run.abort()
        else:
            self._variable(name).abort()

    def __str__(self) -> str:
        """`ProgramState(<the text>)`; waits like `text()`."""
        return f"ProgramState({self.text()})"

    def __repr__(self) -> str:
        names = ", ".join(list(self._strand.variables))
        return f"<ProgramState of {self._run.program!r}: {len(self._strand.segments)} parts, variables: {names}>"


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of a variable must be non-empty text, not {name!r:.80}")
    return name
