"""The turns of a conversation: functions that return them as expressions, and the same as methods of a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import overload

from plait.lang.core.expressions import Expr, Role, RoleBegin, RoleEnd, SystemWithTools, as_expr, role_turn
from plait.lang.tools.make_tools import ToolSource, make_tools


def system(expr: str | Expr = "", tools: Iterable[ToolSource] | None = None) -> Expr:
    """A system turn: `s += system("You are terse.")`. With `tools` it also lists these tools for the model, in the
    chat template's own format if it has one."""
    return role_turn("system", expr) if tools is None else SystemWithTools(as_expr(expr), make_tools("system", tools))


def user(expr: str | Expr = "") -> Expr:
    """A user turn: `s += user(question)`. Control tokens in the text have no effect: it cannot close the turn."""
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


class _NoArgument:
    """The type of the default argument: without an argument the method returns a context manager."""


_NO_ARGUMENT = _NoArgument()


class RoleMethods:
    """The methods of a state that write turns: `s.user(...)`, `with s.user():`, `s.user_begin()`."""

    def _append(self, expr: Expr) -> None:
        raise NotImplementedError

    @overload
    def system(self) -> AbstractContextManager[None]: ...
    @overload
    def system(self, expr: str | Expr, tools: Iterable[ToolSource] | None = None) -> None: ...
    def system(
        self, expr: str | Expr | _NoArgument = _NO_ARGUMENT, tools: Iterable[ToolSource] | None = None
    ) -> AbstractContextManager[None] | None:
        """A system turn: `s.system("...")`, or `with s.system(): s += ...`. `tools`: as in `plait.system`."""
        if tools is None:
            return self._turn("system", expr)
        self._append(system("" if isinstance(expr, _NoArgument) else expr, tools))
        return None

    @overload
    def user(self) -> AbstractContextManager[None]: ...
    @overload
    def user(self, expr: str | Expr) -> None: ...
    def user(self, expr: str | Expr | _NoArgument = _NO_ARGUMENT) -> AbstractContextManager[None] | None:
        """A user turn: `s.user(question)`, or `with s.user(): s += ...`."""
        return self._turn("user", expr)

    @overload
    def assistant(self) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, expr: str | Expr) -> None: ...
    def assistant(self, expr: str | Expr | _NoArgument = _NO_ARGUMENT) -> AbstractContextManager[None] | None:
        """An assistant turn: `s.assistant(gen("x"))`, or `with s.assistant(): s += ...`."""
        return self._turn("assistant", expr)

    def system_begin(self) -> None:
        """Opens a system turn; `system_end()` closes it."""
        self._append(RoleBegin("system"))

    def system_end(self) -> None:
        self._append(RoleEnd("system"))

    def user_begin(self) -> None:
        """Opens a user turn; `user_end()` closes it."""
        self._append(RoleBegin("user"))

    def user_end(self) -> None:
        self._append(RoleEnd("user"))

    def assistant_begin(self) -> None:
        """Opens an assistant turn; `assistant_end()` closes it."""
        self._append(RoleBegin("assistant"))

    def assistant_end(self) -> None:
        self._append(RoleEnd("assistant"))

    def _turn(self, role: Role, expr: str | Expr | _NoArgument) -> AbstractContextManager[None] | None:
        if isinstance(expr, _NoArgument):
            return self._open_turn(role)
        self._append(role_turn(role, expr))
        return None

    @contextmanager
    def _open_turn(self, role: Role) -> Iterator[None]:
        self._append(RoleBegin(role))
        try:
            yield
        finally:  # also after an exception, which the body may catch: the next turn needs this one closed
            self._append(RoleEnd(role))
