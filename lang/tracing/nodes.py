"""The steps of a compiled program, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plait.lang.core.expressions import Expr, Gen, GenToolCall, RoleBegin, RoleEnd, Select, Text
from plait.lang.core.fork_group import JoinMode
from plait.lang.derived.captures import call_of
from plait.lang.source_location import SourceLocation
from plait.lang.tracing.traced_value import TracedValue


@dataclass(frozen=True, eq=False)
class Node:
    """One step on branch number `lane` (0: the program's own), written at `place`."""

    lane: int
    place: SourceLocation | None


@dataclass(frozen=True, eq=False)
class Append(Node):
    """Appends text, a traced value, a gen or select, or the beginning or end of a turn. Never a Concat."""

    expr: Expr
    statement: int = 0  # steps of one expression of the program have the same number

    @property
    def is_call(self) -> bool:
        return isinstance(call_of(self.expr), Gen | Select | GenToolCall)

    @property
    def name(self) -> str | None:
        """The variable that the step sets, if any."""
        expr = call_of(self.expr)
        return expr.name if isinstance(expr, Gen | Select | GenToolCall) else None


@dataclass(frozen=True, eq=False)
class SetVariable(Node):
    """`s[name] = value`."""

    name: str
    value: Any


@dataclass(frozen=True, eq=False)
class BeginScope(Node):
    """`with s.var_scope(name)` begins."""

    name: str


@dataclass(frozen=True, eq=False)
class EndScope(Node):
    """The scope that step `begin` began ends: the text since then is the variable."""

    name: str
    begin: int


@dataclass(frozen=True, eq=False)
class ForkInto(Node):
    """A fork into these branches."""

    branches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Join(Node):
    """Joins the branches. `winners`: after a race, how many of them are joined."""

    branches: tuple[int, ...]
    mode: JoinMode
    winners: int | None = None


@dataclass(frozen=True, eq=False)
class Adopt(Node):
    """The branch continues as branch `index` of its fork."""

    branches: tuple[int, ...]
    index: int


@dataclass(frozen=True, eq=False)
class Read(Node):
    """The body reads the text, the messages or the usage of a state."""

    what: Literal["text", "messages", "usage"]


@dataclass(frozen=True, eq=False)
class RunTool(Node):
    """Runs the tool that variable `name` calls, and appends its result. `timeout` is in seconds."""

    name: str
    timeout: float | None = None


@dataclass(frozen=True, eq=False)
class AppendToolResult(Node):
    """Appends a value as the result of the call in variable `name`, which the program ran itself."""

    name: str
    value: Any


@dataclass(frozen=True, eq=False)
class Cancel(Node):
    """Ends the branch, or the call of variable `name`."""

    name: str | None


def steps_behind(nodes: Sequence[Node], number: int) -> list[Append]:
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
    if isinstance(node, SetVariable | AppendToolResult):
        values = node.value if isinstance(node.value, list | tuple) else (node.value,)
        return tuple(value for value in values if isinstance(value, TracedValue))
    return ()
