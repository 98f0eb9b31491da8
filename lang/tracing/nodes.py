"""The steps of a compiled program, in the order in which its body took them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from plait.lang.core.expressions import Expr, Gen, GenToolCall, Select
from plait.lang.core.fork_group import JoinMode
from plait.lang.core.reasoning import SeparateReasoning
from plait.lang.source_location import SourceLocation
from plait.lang.tracing.traced_value import TracedValue


@dataclass(frozen=True, eq=False)
class Node:
    """One step on strand number `lane` (0 is the program's own), written at `place`."""

    lane: int
    place: SourceLocation | None


@dataclass(frozen=True, eq=False)
class Append(Node):
    """Text, an unknown value, a gen or select, the beginning or end of a turn. Never a Concat."""

    expr: Expr

    @property
    def is_call(self) -> bool:
        return isinstance(self.expr, Gen | Select | GenToolCall | SeparateReasoning)

    @property
    def name(self) -> str | None:
        """The variable that it sets."""
        expr = self.expr.gen if isinstance(self.expr, SeparateReasoning) else self.expr
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
    """It ends: the text since is the variable."""

    name: str


@dataclass(frozen=True, eq=False)
class ForkInto(Node):
    """The strands that go on from here."""

    branches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Join(Node):
    """The branches come together. `winners`: only so many of them do, those that won a race."""

    branches: tuple[int, ...]
    mode: JoinMode
    winners: int | None = None


@dataclass(frozen=True, eq=False)
class Adopt(Node):
    """The strand goes on as one of its branches."""

    branches: tuple[int, ...]
    index: int


@dataclass(frozen=True, eq=False)
class Read(Node):
    """What a state says of itself, kept for what is made of it."""

    what: Literal["text", "messages", "usage"]


@dataclass(frozen=True, eq=False)
class RunTool(Node):
    """The tool that variable `name` calls runs, and its result is appended."""

    name: str


@dataclass(frozen=True, eq=False)
class Cancel(Node):
    """The strand, or the call of variable `name`, is ended."""

    name: str | None


def traced_values_in(node: Node) -> tuple[TracedValue, ...]:
    """The unknown values that this step needs."""
    if isinstance(node, Append) and isinstance(node.expr, TracedValue):
        return (node.expr,)
    if isinstance(node, SetVariable):
        found = node.value if isinstance(node.value, list | tuple) else (node.value,)
        return tuple(each for each in found if isinstance(each, TracedValue))
    return ()
