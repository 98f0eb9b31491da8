"""The steps of a compiled program, as frozen dataclasses: what each does in a run, and its name in a drawing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.lang.core.branch import Branch
from plait.lang.core.expressions import CallExpr, Expr, Gen, GenToolCall, RoleBegin, RoleEnd, Text
from plait.lang.source_location import SourceLocation
from plait.lang.states.fork_group import JoinMode
from plait.lang.states.race import race
from plait.lang.tracing.labels import describe_expr, describe_value, short
from plait.lang.tracing.traced_value import TracedValue, resolve_value

if TYPE_CHECKING:
    from plait.lang.states.state import ProgramState
    from plait.lang.tracing.graph import GraphRun


@dataclass(frozen=True, eq=False)
class Node(ABC):
    """One step on branch number `branch_id` (0: the program's own), written at `place`.

    `nesting`: 1 if the step begins a turn or a scope, -1 if it ends one.
    """

    branch_id: int
    place: SourceLocation | None

    @property
    def nesting(self) -> int:
        return 0

    @abstractmethod
    def run(self, number: int, graph_run: GraphRun, s: ProgramState) -> None:
        """Does the step, which is number `number` of the graph, on the state of its branch."""

    @abstractmethod
    def describe(self) -> str:
        """Returns a short description of the step."""


@dataclass(frozen=True, eq=False)
class Append(Node):
    """Appends text, a traced value, a gen or select, or the beginning or end of a turn. Never a Concat."""

    expr: Expr
    statement: int = 0  # steps of one expression of the program have the same number

    @property
    def is_call(self) -> bool:
        return isinstance(self.expr, CallExpr)

    @property
    def name(self) -> str | None:
        """The variable that the step sets, if any."""
        return self.expr._call.name if isinstance(self.expr, CallExpr) else None

    @property
    def nesting(self) -> int:
        return isinstance(self.expr, RoleBegin) - isinstance(self.expr, RoleEnd)

    def run(self, number: int, graph_run: GraphRun, s: ProgramState) -> None:
        branch, gen = s._branch, self.expr._call if isinstance(self.expr, CallExpr) else None
        num_calls, following = len(branch.call_segments()), list[Append]()
        if isinstance(self.expr, RoleBegin) or (isinstance(gen, Gen) and gen.constraint is not None):
            following = following_steps(graph_run.nodes, number)
        branch.append(graph_run.resolve_expr(self.expr), [graph_run.resolve_expr(step.expr) for step in following])
        for call_segment in branch.call_segments()[num_calls:]:
            call_segment.place = self.place or call_segment.place  # the program's line, not graph.run(...)
        for name in self.expr._variables if isinstance(self.expr, CallExpr) else ():
            graph_run.save_result(number, name, s)

    def describe(self) -> str:
        return describe_expr(self.expr)


@dataclass(frozen=True, eq=False)
class ForkInto(Node):
    """A fork into these branches."""

    branches: tuple[int, ...]

    def run(self, number: int, graph_run: GraphRun, s: ProgramState) -> None:
        group = graph_run.groups[self.branches] = s.fork(len(self.branches))
        graph_run.states.update(zip(self.branches, group.states, strict=True))

    def describe(self) -> str:
        return f"fork into {len(self.branches)}"


@dataclass(frozen=True, eq=False)
class Join(Node):
    """Joins the branches. `winners`: after a race, how many of them are joined."""

    branches: tuple[int, ...]
    mode: JoinMode
    winners: int | None = None

    def run(self, number: int, graph_run: GraphRun, s: ProgramState) -> None:
        group = graph_run.groups[self.branches]
        (race(group, self.winners) if self.winners is not None else group).join(self.mode)
        for name in list(s._branch.variables):
            graph_run.save_result(number, name, s)

    def describe(self) -> str:
        won = f", the first {self.winners} of a race" if self.winners is not None else ""
        return f"join {'variables' if self.mode == 'gather_variable' else 'texts'}{won}"


@dataclass(frozen=True, eq=False)
class Adopt(Node):
    """The branch continues as branch `index` of its fork."""

    branches: tuple[int, ...]
    index: int

    def run(self, number: int, graph_run: GraphRun, s: ProgramState) -> None:
        graph_run.groups[self.branches].adopt(self.index)

    def describe(self) -> str:
        return f"continue as branch {self.index}"


class Action(NamedTuple):
    """What a step does on the state of its branch, besides appending, forking and joining. `do(graph_run, state, name,
    value)` does it. `label`: of the step in a drawing, from its name and value. `nesting`: as of a node."""

    label: str
    do: Callable[[GraphRun, ProgramState, Any, Any], Any]
    nesting: int = 0


ACTIONS = {
    "set": Action("set {0} = {1}", lambda _, s, name, value: s._branch.assign(name, value)),
    "begin scope": Action("scope {0}", lambda _, s, name, __: s._branch.begin_scope(name), 1),
    "end scope": Action("end of scope {0}", lambda run, s, name, begin: _end_scope(run, s, name, begin), -1),
    "read": Action("read the {0}", lambda _, s, what, __: _READS[what](s._branch)),
    "run tool": Action("run the tool of {0}", lambda _, s, name, timeout: s.call(name, timeout)),
    "append result": Action("result of {0} = {1}", lambda _, s, name, value: s.tool_result(name, value)),
    "end": Action("end {0}", lambda _, s, name, __: s.cancel() if name is None else s.abort(name)),
}
"""`s[name] = value`; the beginning of a scope, and its end, whose value is the step that began it; a read of the text,
the messages or the usage; a call of a tool, whose value is the timeout in seconds; the result of a tool that the
program ran itself; the end of a call, or of the branch if there is no name."""

_READS: dict[str, Callable[[Branch], Any]] = {
    "text": Branch.read_text,
    "messages": Branch.read_messages,
    "usage": Branch.read_usage,
}


def _end_scope(graph_run: GraphRun, s: ProgramState, name: str, begin: int) -> None:
    s._branch.end_scope(name, graph_run.step_outputs[begin])


@dataclass(frozen=True, eq=False)
class Act(Node):
    """Does one of ACTIONS with what is called `name`, which it may set."""

    action: str
    name: str | None
    value: Any = None

    @property
    def nesting(self) -> int:
        return ACTIONS[self.action].nesting

    def run(self, number: int, graph_run: GraphRun, s: ProgramState) -> None:
        value = resolve_value(self.value, graph_run)
        graph_run.step_outputs[number] = ACTIONS[self.action].do(graph_run, s, self.name, value)
        if self.name is not None and self.name in s._branch.variables:
            graph_run.save_result(number, self.name, s)

    def describe(self) -> str:
        return ACTIONS[self.action].label.format(self.name or "this text", short(describe_value(self.value)))


def following_steps(nodes: Sequence[Node], number: int) -> list[Append]:
    """Returns the texts that the expression of step `number` appends behind it, with the end of the turn; of the
    beginning of a turn, the call of a tool too."""
    call, found = nodes[number], list[Append]()
    for node in nodes[number + 1 :]:
        if not isinstance(call, Append) or not isinstance(node, Append) or node.statement != call.statement:
            break
        if not isinstance(node.expr, Text | TracedValue | RoleEnd):
            found += [node] if isinstance(call.expr, RoleBegin) and isinstance(node.expr, GenToolCall) else []
            break
        found.append(node)
        if isinstance(node.expr, RoleEnd):
            break
    return found


def traced_values_in(node: Node) -> tuple[TracedValue, ...]:
    """Returns the traced values that a step uses."""
    if isinstance(node, Append) and isinstance(node.expr, TracedValue):
        return (node.expr,)
    if isinstance(node, Act):
        values = node.value if isinstance(node.value, list | tuple) else (node.value,)
        return tuple(value for value in values if isinstance(value, TracedValue))
    return ()
