"""The turns of a conversation: each function gives the nodes that open, fill and close one.

Knows: the three roles. Must not know: the chat template, which belongs to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from plait.lang.core.expressions import Expr, RoleBegin, RoleEnd, SystemWithTools, as_expr, role_turn
from plait.lang.tools.tool import make_tools


def system(expr: str | Expr = "", tools: Iterable[Callable[..., Any]] | None = None) -> Expr:
    """A system turn: `s += system("You are terse.")`. With `tools` it also tells the model of these functions, in
    the model's own form where its chat template has one."""
    return role_turn("system", expr) if tools is None else SystemWithTools(as_expr(expr), make_tools("system", tools))


def user(expr: str | Expr = "") -> Expr:
    """A user turn: `s += user(question)`. The question's text can never close the turn."""
    return role_turn("user", expr)


def assistant(expr: str | Expr = "") -> Expr:
    """An assistant turn: `s += assistant(gen("answer"))`."""
    return role_turn("assistant", expr)


def system_begin() -> Expr:
    """Opens a system turn; `system_end()` closes it."""
    return RoleBegin("system")


def system_end() -> Expr:
    """Closes the system turn."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """Opens a user turn; `user_end()` closes it."""
    return RoleBegin("user")


def user_end() -> Expr:
    """Closes the user turn."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """Opens an assistant turn; `assistant_end()` closes it."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """Closes the assistant turn."""
    return RoleEnd("assistant")
