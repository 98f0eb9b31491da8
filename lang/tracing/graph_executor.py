"""Runs a graph: executes its steps on real states, in the order of the body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.lang.backends.default_backend import resolve_client
from plait.lang.budget import checked_budget
from plait.lang.core.expressions import Concat, Expr, SystemWithTools, Text
from plait.lang.core.results import Segment
from plait.lang.execution.execution import Execution
from plait.lang.sampling_options import RUN_OPTION_KEYWORDS
from plait.lang.tracing.traced_value import TracedValue, resolve_text
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

if TYPE_CHECKING:
    from plait.lang.backends.default_backend import Backend
    from plait.lang.budget import Budget
    from plait.lang.states.state import ProgramState, ProgramStateGroup
    from plait.lang.tracing.graph import Graph


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
