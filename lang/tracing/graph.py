"""`Graph`: what `program.compile(...)` gives, and what it can be made into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.lang.core.expressions import RoleBegin, RoleEnd, Text
from plait.lang.sampling_options import Options
from plait.lang.source_location import SourceLocation
from plait.lang.tracing.nodes import Append, BeginScope, Node

if TYPE_CHECKING:
    from plait.lang.backends.default_backend import Backend
    from plait.lang.budget import Budget
    from plait.lang.core.state import ProgramState


@dataclass(frozen=True, eq=False)
class Graph:
    """The steps of a program, checked. `nodes` are in the order in which the body took them; `lanes` says for each
    strand which one it was forked from; `parameters` are the arguments that compile() was not given.

    >>> graph = qa.compile()                                            # doctest: +SKIP
    >>> print(graph)                                                    # doctest: +SKIP
    program qa(question) at qa.py:5
      "Q: " + question + "\\nA:"
      gen answer
    >>> graph.run(question="Why?")["answer"]                            # doctest: +SKIP
    """

    name: str
    nodes: tuple[Node, ...]
    lanes: tuple[int | None, ...]
    parameters: tuple[str, ...]
    defaults: Options
    place: SourceLocation | None

    @property
    def prefix(self) -> tuple[Append, ...]:
        """The steps before the first that depends on an argument or on the model: what all runs have in common."""
        found: list[Append] = []
        for node in self.nodes:
            if isinstance(node, Append) and isinstance(node.expr, Text | RoleBegin | RoleEnd) and not node.lane:
                found.append(node)
            elif not isinstance(node, BeginScope):
                break
        return tuple(found)

    @property
    def is_straight(self) -> bool:
        """Whether it can be said as the JSON of `POST /v1/programs`, all arguments given or not."""
        from plait.lang.tracing.program_request import UnsupportedControlFlow, build_program

        try:
            build_program(self, {})
        except UnsupportedControlFlow:
            return False
        return True

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart: boxes in order, forks side by side, dotted lines where a value goes."""
        from plait.lang.tracing.graph_rendering import as_mermaid

        return as_mermaid(self)

    def json(self, **arguments: str) -> dict[str, Any]:
        """The body of `POST /v1/programs` that does what the program does. `arguments` that are given here stand in it
        as text; the others are variables, which whoever posts it adds under "variables".

        Raises CompileError, which names the line, for a step that has no form there. Values come as their text.

        >>> httpx.post(f"{server}/v1/programs", json=qa.compile().json(question="Why?"))     # doctest: +SKIP
        """
        from plait.lang.tracing.program_request import build_request

        return build_request(self, arguments)

    def run(self, *, backend: Backend | None = None, budget: Budget | None = None, **arguments: Any) -> ProgramState:
        """Runs the steps, not the body: `arguments` are those that compile() was not given. What the body returns, and
        whatever else it does, is not part of the graph.

        Raises InputError for missing or unknown arguments, ProgramError when a call fails.
        """
        from plait.lang.tracing.graph_executor import run_graph

        return run_graph(self, arguments, backend, budget)

    def __str__(self) -> str:
        from plait.lang.tracing.graph_rendering import as_text

        return as_text(self)

    def __repr__(self) -> str:
        return f"<graph of plait program {self.name!r}: {len(self.nodes)} steps on {len(self.lanes)} strands>"
