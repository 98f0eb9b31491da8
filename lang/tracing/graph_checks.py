"""What can be known to be wrong with a program whose body was carried out once: constraints, and lost branches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from plait.constrained.specs import Choices, Spec
from plait.lang.core.expressions import Gen, GenToolCall
from plait.lang.core.reasoning import SeparateReasoning
from plait.lang.errors import Problem
from plait.lang.tools.call_format import tool_call_format
from plait.lang.tools.call_syntax import DEFAULT_CALL_SYNTAX
from plait.lang.tracing.nodes import Append, ForkInto, Node

if TYPE_CHECKING:
    from plait.lang.tracing.traced_run import TracedRun


def find_problems(traced_run: TracedRun) -> list[Problem]:
    """All of them, in the order of the program."""
    found = [*_constraints(traced_run), *_unused_forks(traced_run)]
    return [problem for _, problem in sorted(found, key=lambda each: each[0])]


def _constraints(traced_run: TracedRun) -> Iterator[tuple[int, Problem]]:
    """Constraints that no runtime can hold. Each is compiled once, as the runtime would, in a process of its own."""
    known: dict[Spec, str | None] = {}
    for number, node in enumerate(traced_run.nodes):
        spec = _constraint_of(node)
        if spec is None or isinstance(spec, Choices):
            continue
        if spec not in known:
            from plait.runtime.client.constraint_compile import (
                constraint_error,  # grammar libraries, which few programs need here
            )

            known[spec] = constraint_error(spec)
        why = known[spec]
        if why is not None:
            assert isinstance(node, Append)
            name = f"gen({node.name!r})" if node.name else "gen"
            yield number, Problem(f"{name}: the constraint cannot be used: {why}", node.place)


def _constraint_of(node: Node) -> Spec | None:
    if not isinstance(node, Append):
        return None
    expr = node.expr.gen if isinstance(node.expr, SeparateReasoning) else node.expr
    if isinstance(expr, GenToolCall):
        return tool_call_format(expr.tools, expr.choice, DEFAULT_CALL_SYNTAX).spec
    return expr.constraint if isinstance(expr, Gen) else None


def _unused_forks(traced_run: TracedRun) -> Iterator[tuple[int, Problem]]:
    """Forks whose branches were never joined or read, and that nobody holds now that the body is over."""
    for number, handles in traced_run.forks:
        node = traced_run.nodes[number]
        assert isinstance(node, ForkInto)
        if traced_run.read_lanes.isdisjoint(node.branches) and all(handle() is None for handle in handles):
            many = f"the {len(node.branches)} branches of this fork are" if len(node.branches) > 1 else "this fork is"
            text = f"{many} computed for nothing: never joined, never read, and not returned"
            yield number, Problem(text, node.place)
