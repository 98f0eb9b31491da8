"""Counts the work that a chat template does while it is rendered, and stops it at a limit.

One unit is the evaluation of one node of the template's syntax tree, or an item or 128 characters that one operation
reads; it takes some 50 to 200 ns. Loops and macros are the only repetition in Jinja, so a statement at the beginning of
their bodies counts the nodes of the body. The count does not depend on the machine or on its load.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

TEXT_PER_UNIT = 128  # characters
CALL = 8  # a call, or what a filter such as `map` does with an item
_CONTAINERS = (dict, list, tuple, set, frozenset, range, deque)
_COMPARISONS = frozenset(
    ("eq", "equalto", "==", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "ge", ">=", "le", "<=", "in")
)


class LimitReached(Exception):
    """The template exceeded a limit."""


class TooMuchWork(LimitReached):
    """The template does more work than it may."""


class Work:
    """The work of one rendering, in units. `left`: what it may still do."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    @property
    def done(self) -> int:
        return self.limit - self.left


class _Current(threading.local):
    work: Work | None = None  # None: no template is rendered


_current = _Current()


@contextmanager
def limited_work(limit: int) -> Iterator[Work]:
    """Counts the template work of this thread; `charge` raises LimitReached once it is more than `limit`, or than what
    is left of a limit around this one."""
    outer = _current.work
    _current.work = work = Work(limit if outer is None else min(limit, outer.left))
    try:
        yield work
    finally:
        _current.work = outer
        if outer is not None:
            outer.left -= work.done


def charge(units: int) -> None:
    """Counts work. Raises LimitReached beyond the limit."""
    work = _current.work
    if work is None:
        return
    work.left -= units
    if work.left < 0:
        raise TooMuchWork("it runs too long")


def charge_reading(value: Any) -> Any:
    """Counts the work of an operation that reads `value` once, and returns `value`."""
    if isinstance(value, str | bytes):
        charge(1 + len(value) // TEXT_PER_UNIT)
    elif isinstance(value, _CONTAINERS):
        charge(1 + len(value))
    return value


def charge_comparison(value: Any) -> Any:
    """Counts the work of comparing `value` to another, which reads all values inside it, and returns `value`."""
    stack = [value]
    while stack:
        item = charge_reading(stack.pop())
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    return value


def charged(operation: Any, *, compares: bool = False) -> Any:
    """A filter of Jinja's that counts the work of reading its arguments. compares: whether it compares items."""

    @wraps(operation)  # with the attribute that says whether Jinja passes its environment
    def counted(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_counted_items(argument, compares) for argument in args)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, _CONTAINERS):
                charge(CALL * len(argument))
                for _ in range(len(argument).bit_length() if compares else 0):  # as often as sorting reads an item
                    charge_comparison(argument)
            else:
                charge_reading(argument)
        return operation(*args, **kwargs)

    return counted


def _counted_items(value: Any, is_read: bool) -> Any:
    """What `map` and others yield has no length: its items are counted when they are read."""
    if not isinstance(value, Iterator):
        return value
    return list(charge_each(value, CALL)) if is_read else charge_each(value, CALL)


def charge_each(values: Iterable[Any], units: int = 1) -> Iterator[Any]:
    """Yields the values, and counts each. The body of a loop with a condition does not see all of them."""
    for value in values:
        charge(units)
        yield value


FILTERS: dict[str, Callable[..., Any]] = {
    "plait_charge": charge,
    "plait_charge_each": charge_each,
    "plait_charge_reading": charge_reading,
    "plait_charge_comparison": charge_comparison,
}


class WorkTransformer(NodeTransformer):
    """Adds the counting to a template: see FILTERS."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self._repeated(node)
        if node.test is not None:
            node.iter = _filtered(node.iter, "plait_charge_each")
        return node

    def _repeated(self, node: Any) -> Any:
        size = 1 + sum(map(_num_nodes, node.body))
        self.generic_visit(node)
        count = _filtered(nodes.Const(size, lineno=node.lineno), "plait_charge")
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _repeated

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        contained = any(operand.op in ("in", "notin") for operand in node.ops)
        if contained or not any(isinstance(operand, nodes.Const) for operand in operands):
            node.expr = _filtered(node.expr, "plait_charge_comparison")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "plait_charge_comparison")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "plait_charge_reading")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.name in _COMPARISONS:
            node.node = _filtered(node.node, "plait_charge_comparison")
            node.args = [_filtered(argument, "plait_charge_comparison") for argument in node.args]
        return node


def _num_nodes(node: nodes.Node) -> int:
    """Counts the nodes that are evaluated when `node` is: those in the bodies of loops and macros count themselves."""
    if isinstance(node, nodes.Macro | nodes.Block):
        return 1
    children = node.iter_child_nodes(exclude=("body",) if isinstance(node, nodes.For | nodes.CallBlock) else None)
    return 1 + sum(map(_num_nodes, children))


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
