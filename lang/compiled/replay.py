"""Runs a graph: each step is done to real states, in the order in which the body did it.

Knows: steps and what states can do. Must not know: how a graph came about, sockets.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from plait.lang.answers import Readable
from plait.lang.backend import resolve
from plait.lang.compat.reasoning import SUFFIX, Reasoned
from plait.lang.compiled.nodes import (
    Adopt,
    Append,
    BeginScope,
    End,
    EndScope,
    ForkInto,
    Join,
    Node,
    Read,
    RunTool,
    SetVariable,
)
from plait.lang.compiled.unknown import NotKnown, known, text_of
from plait.lang.control.budget import checked_budget
from plait.lang.control.race import race
from plait.lang.errors import did_you_mean
from plait.lang.execution import Execution
from plait.lang.expressions import Concat, Expr, SystemWithTools, Text
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.backend import Backend
    from plait.lang.compiled.graph import Graph
    from plait.lang.control.budget import Budget
    from plait.lang.group import ProgramStateGroup
    from plait.lang.state import ProgramState


def run_graph(graph: Graph, arguments: dict[str, Any], backend: Backend | None, budget: Budget | None) -> ProgramState:
    """One run of the steps. Raises InputError before anything runs, ProgramError when a call fails."""
    for name in arguments:
        if name not in graph.parameters:
            open_now = f"its arguments are {', '.join(graph.parameters)}" if graph.parameters else "it takes none"
            raise InputError(
                f"graph of {graph.name!r}: no argument {name!r}{did_you_mean(name, graph.parameters)}; {open_now}"
            )
    missing = [name for name in graph.parameters if name not in arguments]
    if missing:
        raise InputError(f"graph of {graph.name!r}: the argument {missing[0]!r} is missing")
    client = resolve(backend)
    graph.defaults.check_alone(client.model.vocab_size)

    def body(s: ProgramState) -> None:
        _Replay(graph, arguments, s).perform()

    return Execution(graph.name, body, (), {}, client, graph.defaults, checked_budget("run", budget)).perform()


class _Replay:
    """The states of one run by number, and what the steps so far gave."""

    def __init__(self, graph: Graph, arguments: dict[str, Any], state: ProgramState) -> None:
        self._graph, self._arguments = graph, arguments
        self._states: dict[int, ProgramState] = {0: state}
        self._groups: dict[tuple[int, ...], ProgramStateGroup] = {}
        self._results: dict[tuple[int, str | None], Readable] = {}
        self._kept: dict[int, Any] = {}
        self._scopes: dict[tuple[int, str], contextlib.ExitStack] = {}

    def perform(self) -> None:
        for number, node in enumerate(self._graph.nodes):
            self._step(number, node, self._states[node.strand])

    # -- Env --------------------------------------------------------------------------------------

    def argument(self, name: str) -> Any:
        return self._arguments[name]

    def result(self, node: int, name: str | None) -> Readable:
        return self._results[node, name]

    def kept(self, node: int) -> Any:
        return self._kept[node]

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, number: int, node: Node, state: ProgramState) -> None:
        match node:
            case Append():
                before = len(state._strand.answers())
                state._append(self._now(node.expr))
                for answer in state._strand.answers()[before:]:
                    answer.place = node.place or answer.place  # of the program's own line, not of graph.run(...)
                for name in _names(node):
                    self._keep(number, name, state)
            case SetVariable():
                state.set_var(node.name, known(node.value, self))
                self._keep(number, node.name, state)
            case BeginScope():
                stack = self._scopes[node.strand, node.name] = contextlib.ExitStack()
                stack.enter_context(state.var_scope(node.name))
            case EndScope():
                self._scopes.pop((node.strand, node.name)).close()
                self._keep(number, node.name, state)
            case ForkInto():
                group = self._groups[node.branches] = state.fork(len(node.branches))
                self._states.update(zip(node.branches, group.states, strict=True))
            case Join():
                self._join(number, node, state)
            case Adopt():
                self._groups[node.branches].adopt(node.index)
            case Read():
                self._kept[number] = getattr(state, node.what) if node.what == "usage" else getattr(state, node.what)()
            case RunTool():
                self._kept[number] = state.call(node.name)
            case End():
                state.cancel() if node.name is None else state.abort(node.name)

    def _join(self, number: int, node: Join, state: ProgramState) -> None:
        group = self._groups[node.branches]
        (race(group, node.winners) if node.winners is not None else group).join(node.mode)
        for name in list(state._strand.variables):
            self._keep(number, name, state)

    def _keep(self, number: int, name: str, state: ProgramState) -> None:
        self._results[number, name] = state._strand.variables[name]

    def _now(self, expr: Expr) -> Expr:
        """`expr` with what was unknown in it as text."""
        match expr:
            case NotKnown():
                return Text(text_of(expr, self))
            case Concat():
                return Concat(tuple(self._now(part) for part in expr.parts))
            case SystemWithTools():
                return SystemWithTools(self._now(expr.content), expr.tools)
        return expr


def _names(node: Append) -> list[str]:
    if node.name is None:
        return []
    return [node.name, f"{node.name}{SUFFIX}"] if isinstance(node.expr, Reasoned) else [node.name]
