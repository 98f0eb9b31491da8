"""Checks of a compiled program: constraints that cannot be compiled, and branches whose results are never used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from plait.constrained.specs import Choices, Spec
from plait.lang.core.expressions import CallExpr, Gen, GenToolCall
from plait.lang.errors import Problem
from plait.lang.tools.call_format import tool_call_format
from plait.lang.tracing.nodes import Append, ForkInto, Node

if TYPE_CHECKING:
    from plait.lang.tracing.traced_run import TracedRun


def find_problems(traced_run: TracedRun) -> list[Problem]:
    """Returns all problems, in the order of the program."""
    numbered_problems = [*_constraints(traced_run), *_unused_forks(traced_run)]
    return [problem for _, problem in sorted(numbered_problems, key=lambda numbered: numbered[0])]


def _constraints(traced_run: TracedRun) -> Iterator[tuple[int, Problem]]:
    """Yields constraints that do not compile. Each is compiled once, in a separate process, as the runtime does."""
    errors: dict[Spec, str | None] = {}
    for number, node in enumerate(traced_run.nodes):
        spec = _constraint_of(node)
        if spec is None or isinstance(spec, Choices):
            continue
        if spec not in errors:
            from plait.runtime.client.constraint_check import constraint_error  # lazy: loads the grammar libraries

            errors[spec] = constraint_error(spec)
        reason = errors[spec]
        if reason is not None:
            assert isinstance(node, Append)
            name = f"gen({node.name!r})" if node.name else "gen"
            yield number, Problem(f"{name}: the constraint cannot be used: {reason}", node.place)


def _constraint_of(node: Node) -> Spec | None:
    if not isinstance(node, Append) or not isinstance(node.expr, CallExpr):
        return None
    expr = node.expr._call
    if isinstance(expr, GenToolCall):
        return tool_call_format(expr.tools, expr.choice, value=expr.value_format).spec
    return expr.constraint if isinstance(expr, Gen) else None


def _unused_forks(traced_run: TracedRun) -> Iterator[tuple[int, Problem]]:
    """Yields forks whose branches were never joined or read, and to which no reference is left after the body."""
    for number, handles in traced_run.forks:
        node = traced_run.nodes[number]
        assert isinstance(node, ForkInto)
        if traced_run.read_branches.isdisjoint(node.branches) and all(handle() is None for handle in handles):
            fork = f"the {len(node.branches)} branches of this fork are" if len(node.branches) > 1 else "this fork is"
            text = f"{fork} never used: neither joined nor read nor returned"
            yield number, Problem(text, node.place)
