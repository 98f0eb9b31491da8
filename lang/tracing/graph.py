"""`Graph`: the result of `program.compile(...)`. It can be printed, drawn, run, and converted to an HTTP request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from plait.lang.backends.default_backend import resolve_client
from plait.lang.budget import checked_budget
from plait.lang.core.expressions import Concat, Expr, RoleBegin, RoleEnd, SystemWithTools, Text
from plait.lang.core.results import Segment
from plait.lang.execution.execution import Execution
from plait.lang.sampling_options import RUN_OPTION_KEYWORDS, Options
from plait.lang.source_location import SourceLocation
from plait.lang.tracing.nodes import Act, Append, Node
from plait.lang.tracing.traced_value import TracedValue, resolve_text
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

if TYPE_CHECKING:
    from plait.lang.backends.default_backend import Backend
    from plait.lang.budget import Budget
    from plait.lang.states.state import ProgramState, ProgramStateGroup


@dataclass(frozen=True, eq=False)
class Graph:
    """The checked steps of a program. `nodes`: the steps, in the order of the body. `branch_parents`: for each
    branch, the number of its parent branch. `parameters`: the arguments that were not given to compile().

    >>> graph = qa.compile()                                            # doctest: +SKIP
    >>> print(graph)                                                    # doctest: +SKIP
    program qa(question) at qa.py:5
      "Q: " + question + "\\nA:"
      gen answer
    >>> graph.run(question="Why?")["answer"]                            # doctest: +SKIP
    """

    name: str
    nodes: tuple[Node, ...]
    branch_parents: tuple[int | None, ...]
    parameters: tuple[str, ...]
    defaults: Options
    place: SourceLocation | None

    @property
    def lanes(self) -> tuple[int | None, ...]:
        """The former name of `branch_parents`, until the next release."""
        return self.branch_parents

    @property
    def prefix(self) -> tuple[Append, ...]:
        """The steps before the first one that depends on an argument or on the model: the text that all runs share."""
        prefix: list[Append] = []
        for node in self.nodes:
            if isinstance(node, Append) and isinstance(node.expr, Text | RoleBegin | RoleEnd) and not node.branch_id:
                prefix.append(node)
            elif not (isinstance(node, Act) and node.action == "begin scope"):
                break
        return tuple(prefix)

    @property
    def is_straight(self) -> bool:
        """Whether `json()` can express the program as a request of `POST /v1/programs`."""
        from plait.lang.tracing.program_request import UnsupportedControlFlow, build_program

        try:
            build_program(self, {})
        except UnsupportedControlFlow:
            return False
        return True

    def mermaid(self) -> str:
        """Returns a Mermaid flowchart: the steps in order, forks in parallel, dotted lines for the flow of values."""
        from plait.lang.tracing.graph_rendering import as_mermaid

        return as_mermaid(self)

    def json(self, **arguments: str) -> dict[str, Any]:
        """Returns the request body of `POST /v1/programs` that does the same as the program. `arguments` given here are
        written into it as text; the others stay variables, to be added under "variables" when it is posted.

        Values are returned as text. Raises CompileError, which names the line, for a step that cannot be expressed.

        >>> httpx.post(f"{server}/v1/programs", json=qa.compile().json(question="Why?"))     # doctest: +SKIP
        """
        from plait.lang.tracing.program_request import build_request

        return build_request(self, arguments)

    def run(self, *, backend: Backend | None = None, budget: Budget | None = None, **arguments: Any) -> ProgramState:
        """Runs the steps without the body. `arguments` are those that were not given to compile(). The return value and
        other effects of the body are not part of the graph.

        Raises InputError for missing or unknown arguments, and ProgramError if a call fails.
        """
        return graph_execution(self, arguments, backend, budget).run_to_completion()

    async def arun(
        self, *, backend: Backend | None = None, budget: Budget | None = None, **arguments: Any
    ) -> ProgramState:
        """`run` for an event loop, which it does not block. Cancelling the task ends the calls.

        >>> state = await qa.compile().arun(question="Why?")     # doctest: +SKIP
        """
        from plait.lang.execution.event_loop import run_async

        return await run_async(graph_execution(self, arguments, backend, budget))

    def __str__(self) -> str:
        from plait.lang.tracing.graph_rendering import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        """Returns the steps as HTML for notebooks, the branches of a fork side by side."""
        from plait.lang.html.render import fragment
        from plait.lang.tracing.graph_rendering import steps

        return fragment("graph", self, partial(steps, self))

    def __repr__(self) -> str:
        return f"<graph of plait program {self.name!r}: {len(self.nodes)} steps on {len(self.branch_parents)} branches>"


# -- a run ----------------------------------------------------------------------------------------


def graph_execution(
    graph: Graph, arguments: dict[str, Any], backend: Backend | None, budget: Budget | None
) -> Execution:
    """Returns one run of the steps, which was not started. Raises InputError for wrong arguments."""
    for name in arguments:
        if name not in graph.parameters:
            if name == "sampling" or name in RUN_OPTION_KEYWORDS:
                raise InputError(f"graph of {graph.name!r}: {name!r} belongs to compile: program.compile({name}=...)")
            known = f"its arguments are {', '.join(graph.parameters)}" if graph.parameters else "it takes none"
            raise InputError(
                f"graph of {graph.name!r}: no argument {name!r}{did_you_mean(name, graph.parameters)}; {known}"
            )
    missing = [name for name in graph.parameters if name not in arguments]
    if missing:
        raise InputError(f"graph of {graph.name!r}: the argument {missing[0]!r} is missing")
    client = resolve_client(backend)
    graph.defaults.check_as_defaults(client.model.vocab_size)

    def body(s: ProgramState) -> None:
        GraphRun(graph, arguments, s).run_to_completion()

    execution = Execution(graph.name, body, (), {}, client, graph.defaults, checked_budget("run", budget))
    execution.run.arguments = arguments
    return execution


class GraphRun:
    """One run of a graph, which its steps do one after the other.

    `states`: by branch number. `groups`: the forks, by the numbers of their branches. `step_outputs`: of the steps that
    read a state or run a tool; of one that begins a scope, where its text begins.
    """

    def __init__(self, graph: Graph, arguments: dict[str, Any], state: ProgramState) -> None:
        self.nodes, self._arguments = graph.nodes, arguments
        self.states: dict[int, ProgramState] = {0: state}
        self.groups: dict[tuple[int, ...], ProgramStateGroup] = {}
        self.step_outputs: dict[int, Any] = {}
        self._results: dict[tuple[int, str | None], Segment] = {}

    def run_to_completion(self) -> None:
        for number, node in enumerate(self.nodes):
            node.run(number, self, self.states[node.branch_id])

    # -- EvaluationContext ------------------------------------------------------------------------

    def argument(self, name: str) -> Any:
        return self._arguments[name]

    def result(self, node: int, name: str | None) -> Segment:
        return self._results[node, name]

    def step_output(self, node: int) -> Any:
        return self.step_outputs[node]

    # -- for the steps ----------------------------------------------------------------------------

    def save_result(self, number: int, name: str, state: ProgramState) -> None:
        """Keeps variable `name`, as step `number` has set it, for the traced values that refer to it."""
        self._results[number, name] = state._branch.variables[name]

    def resolve_expr(self, expr: Expr) -> Expr:
        """Returns `expr` with the traced values in it replaced by their text."""
        match expr:
            case TracedValue():
                return Text(resolve_text(expr, self))
            case Concat():
                return Concat(tuple(self.resolve_expr(part) for part in expr.parts))
            case SystemWithTools():
                return SystemWithTools(self.resolve_expr(expr.content), expr.tools)
        return expr
