"""Runs a graph: executes its steps on real states, in the order of the body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.lang.backends.default_backend import resolve_client
from plait.lang.budget import checked_budget
from plait.lang.control.race import race
from plait.lang.core.execution import Execution
from plait.lang.core.expressions import Concat, Expr, Gen, RoleBegin, SystemWithTools, Text
from plait.lang.core.results import Segment
from plait.lang.derived.captures import GenWithCaptures, variables_of
from plait.lang.sampling_options import RUN_OPTION_KEYWORDS
from plait.lang.tracing.nodes import (
    Adopt,
    Append,
    AppendToolResult,
    BeginScope,
    Cancel,
    EndScope,
    ForkInto,
    Join,
    Node,
    Read,
    RunTool,
    SetVariable,
    steps_behind,
)
from plait.lang.tracing.traced_value import TracedValue, resolve_text, resolve_value
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

if TYPE_CHECKING:
    from plait.lang.backends.default_backend import Backend
    from plait.lang.budget import Budget
    from plait.lang.core.state import ProgramState, ProgramStateGroup
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
        _GraphExecutor(graph, arguments, s).run_to_completion()

    return Execution(graph.name, body, (), {}, client, graph.defaults, checked_budget("run", budget))


class _GraphExecutor:
    """One run of a graph: the states by branch number, and the outputs of the steps so far."""

    def __init__(self, graph: Graph, arguments: dict[str, Any], state: ProgramState) -> None:
        self._graph, self._arguments = graph, arguments
        self._states: dict[int, ProgramState] = {0: state}
        self._groups: dict[tuple[int, ...], ProgramStateGroup] = {}
        self._results: dict[tuple[int, str | None], Segment] = {}
        self._step_outputs: dict[int, Any] = {}
        self._scopes: dict[int, int] = {}  # where the text begins, by the step that begins a scope

    def run_to_completion(self) -> None:
        for number, node in enumerate(self._graph.nodes):
            self._step(number, node, self._states[node.lane])

    # -- EvaluationContext ------------------------------------------------------------------------

    def argument(self, name: str) -> Any:
        return self._arguments[name]

    def result(self, node: int, name: str | None) -> Segment:
        return self._results[node, name]

    def step_output(self, node: int) -> Any:
        return self._step_outputs[node]

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, number: int, node: Node, state: ProgramState) -> None:
        branch = state._branch
        match node:
            case Append():
                num_calls = len(branch.call_segments())
                behind = steps_behind(self._graph.nodes, number) if _looks_behind(node.expr) else []
                branch.append(self._resolve_expr(node.expr), [self._resolve_expr(step.expr) for step in behind])
                for call_segment in branch.call_segments()[num_calls:]:
                    call_segment.place = node.place or call_segment.place  # the program's line, not graph.run(...)
                for name in variables_of(node.expr) if node.is_call else ():
                    self._save_result(number, name, state)
            case SetVariable():
                branch.assign(node.name, resolve_value(node.value, self))
                self._save_result(number, node.name, state)
            case BeginScope():
                self._scopes[number] = branch.begin_scope(node.name)
            case EndScope():
                branch.end_scope(node.name, self._scopes[node.begin])
                self._save_result(number, node.name, state)
            case ForkInto():
                group = self._groups[node.branches] = state.fork(len(node.branches))
                self._states.update(zip(node.branches, group.states, strict=True))
            case Join():
                self._join(number, node, state)
            case Adopt():
                self._groups[node.branches].adopt(node.index)
            case Read():
                self._step_outputs[number] = getattr(branch, f"read_{node.what}")()
            case RunTool():
                self._step_outputs[number] = state.call(node.name, node.timeout)
            case AppendToolResult():
                self._step_outputs[number] = state.tool_result(node.name, resolve_value(node.value, self))
            case Cancel():
                state.cancel() if node.name is None else state.abort(node.name)

    def _join(self, number: int, node: Join, state: ProgramState) -> None:
        group = self._groups[node.branches]
        (race(group, node.winners) if node.winners is not None else group).join(node.mode)
        for name in list(state._branch.variables):
            self._save_result(number, name, state)

    def _save_result(self, number: int, name: str, state: ProgramState) -> None:
        self._results[number, name] = state._branch.variables[name]

    def _resolve_expr(self, expr: Expr) -> Expr:
        """Returns `expr` with the traced values in it replaced by their text."""
        match expr:
            case TracedValue():
                return Text(resolve_text(expr, self))
            case Concat():
                return Concat(tuple(self._resolve_expr(part) for part in expr.parts))
            case SystemWithTools():
                return SystemWithTools(self._resolve_expr(expr.content), expr.tools)
        return expr


def _looks_behind(expr: Expr) -> bool:
    gen = expr.gen if isinstance(expr, GenWithCaptures) else expr
    return isinstance(expr, RoleBegin) or (isinstance(gen, Gen) and gen.constraint is not None)
