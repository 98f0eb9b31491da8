"""What a program's body holds as `s`, and what `run` gives back: a handle on one strand.

Knows: reading, forking and calling tools as SGLang's users spell it. Must not know: how nodes run, sockets, threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plait.lang.control.ending import end_branch
from plait.lang.reading import Reading
from plait.lang.tools.calling import ToolResult, call_tool
from plait.lang.writing import Writing, no_offset

if TYPE_CHECKING:
    from plait.lang.group import ProgramStateGroup
    from plait.lang.strand import Strand


class ProgramState(Writing, Reading):
    """The growing text of a program, and its variables.

    >>> s += "The capital of France is" + gen("city", max_tokens=4)     # doctest: +SKIP
    >>> s["city"]                                                       # doctest: +SKIP
    ' Paris.'
    """

    def __init__(self, strand: Strand, *, outside: bool = False) -> None:
        Reading.__init__(self, strand, outside)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> ProgramStateGroup:
        """`size` states that go on from this text side by side; the text so far is shared, not recomputed.

        >>> forks = s.fork(3)                                           # doctest: +SKIP
        >>> forks += lambda i: f"Tip {i + 1}:" + gen("tip")             # doctest: +SKIP
        >>> forks.join(); s["tip"]                                      # doctest: +SKIP
        [..., ..., ...]
        """
        from plait.lang.group import ProgramStateGroup

        no_offset(position_ids_offset)
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

    def cancel(self) -> None:
        """Ends this text at once: its calls, and those of its branches. Inside the body the program goes on without
        it; outside, the program ends. What is read of it afterwards raises."""
        if self._outside:
            self._run.abort()
        else:
            end_branch(self._strand, "this text was cancelled")

    def abort(self, name: str | None = None) -> None:
        """Ends the call of variable `name`, or the whole program, at once; what is read afterwards raises."""
        if name is None:
            self._run.abort()
        else:
            self._variable(name).abort()

    def show(self, path: str | Path | None = None) -> Path:
        """Writes what the program did as a page (.html) or a Perfetto trace (.json), once it is done; the path. Without
        one, a page is opened in the browser. A lane for each branch, time across, text and tokens on hover."""
        from plait.lang.trace.showing import show  # a browser and all that, which few programs need

        self._wait_for_body()
        return show(self._run, path)

    def _repr_html_(self) -> str:
        """The text for a notebook, what was generated marked."""
        from plait.lang.trace.showing import as_html

        return as_html(self._strand)

    def __str__(self) -> str:
        """`ProgramState(<the text>)`; waits like `text()`."""
        return f"ProgramState({self.text()})"
