"""The expressions that a program can append, as frozen dataclasses. They are steps, which run on a branch."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from plait.constrained.specs import Spec
from plait.lang.sampling_options import Options
from plait.lang.tools.call_format import ToolChoice
from plait.lang.tools.tool import Tool
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.errors import InputError
from plait.runtime.programs.steps import RoleBeginStep, RoleEndStep, Step, TextStep

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.runtime.messages import SelectMethod

Role = Literal["system", "user", "assistant", "tool"]
T = TypeVar("T")


@dataclass(frozen=True)
class Expr(Step):
    """Base of all that `s += ...` takes. Expressions and strings are concatenated with `+`."""

    def __add__(self, other: str | Expr) -> Expr:
        return Concat((*_parts(self), *_parts(as_expr(other))))

    def __radd__(self, other: str | Expr) -> Expr:
        return Concat((*_parts(as_expr(other)), *_parts(self)))

    def __format__(self, spec: str) -> str:
        raise InputError(
            f"{_describe(self)} is used inside an f-string or format(), where it would never run; "
            "write 'text' + gen(...) + 'text'"
        )

    def __str__(self) -> str:
        raise InputError(
            f"{_describe(self)} is converted to text by str() or '%s', where it would never run; "
            "write 'text' + gen(...) + 'text'"
        )

    def __bool__(self) -> bool:
        raise InputError(f"{_describe(self)} has no value yet: append it with s += ..., then read it with s['name']")

    def __getitem__(self, name: object) -> Any:
        raise InputError(f"{_describe(self)} has no value: append it with s += ..., then read s[{name!r}]")


@dataclass(frozen=True)
class Text(Expr, TextStep):
    """Plain text. It is never tokenized into a control token."""


@dataclass(frozen=True)
class Concat(Expr):
    """Several expressions in a row."""

    parts: tuple[Expr, ...]

    def _run_on(self, branch: Branch, following: Sequence[Step]) -> None:
        for index, part in enumerate(self.parts):
            part._run_on(branch, self.parts[index + 1 :])


@dataclass(frozen=True)
class CallExpr(Expr):
    """An expression with one call, whose text it appends. `adapter`: what computes it; None: that of its program."""

    adapter: str | None = field(default=None, kw_only=True)

    @property
    def _call(self) -> Gen | Select | GenToolCall:
        """The call itself, without what else the expression does with its text."""
        assert isinstance(self, Gen | Select | GenToolCall)
        return self

    @property
    def _variables(self) -> list[str]:
        """The variables that it sets, that of the call first."""
        return [] if self._call.name is None else [self._call.name]

    def _run_on(self, branch: Branch, following: Sequence[Step]) -> None:
        branch.begin_call(self, following)

    def _begin(self, branch: Branch, following: Sequence[Step]) -> None:
        """Starts the call, and sets its variables. `following`: what the same expression of the program appends."""
        branch.begin_own_call(self._call, following)


@dataclass(frozen=True)
class Gen(CallExpr):
    """Sampled text, optionally constrained."""

    name: str | None
    options: Options = field(default_factory=Options)
    constraint: Spec | None = None
    value_format: ValueFormat | None = None
    retries: int = 0  # how many times the model is asked again if the value is refused
    draft_tokens: int = 0  # most tokens of a free draft before the value; 0: no draft


@dataclass(frozen=True)
class Typed(Gen, Generic[T]):
    """`gen(name, type=T)`, whose value is parsed as a T. It is also a typed handle: type checkers see `s[p]` as a T.

    >>> age = gen("age", type=int)                                  # doctest: +SKIP
    >>> s += "I am " + age; s[age] + 1                              # doctest: +SKIP
    """


@dataclass(frozen=True)
class Select(CallExpr):
    """The best-scored of several texts, read as `value_format` says. `timeout_s` overrides the program's default."""

    name: str | None
    choices: tuple[str, ...]
    method: SelectMethod
    timeout_s: float | None = None
    value_format: ValueFormat | None = None
    options: Options = field(default_factory=Options)  # the seed, of the method "exact"


@dataclass(frozen=True)
class GenToolCall(CallExpr):
    """A call of one of several tools, in the model's own tool-call syntax; or a value of `value_format` instead."""

    name: str | None
    options: Options
    tools: tuple[Tool, ...]
    choice: ToolChoice
    value_format: ValueFormat | None = None


@dataclass(frozen=True)
class RoleBegin(Expr, RoleBeginStep):
    """The chat template's text before a turn."""

    role: Role


@dataclass(frozen=True)
class SystemWithTools(Expr):
    """A system turn that also lists tools, in the chat template's own format if it has one."""

    content: Expr
    tools: tuple[Tool, ...]

    def _run_on(self, branch: Branch, following: Sequence[Step]) -> None:
        branch.write_system_turn(self)


@dataclass(frozen=True)
class RoleEnd(Expr, RoleEndStep):
    """The chat template's text after a turn."""

    role: Role


def as_expr(value: object) -> Expr:
    """Returns `value` as an expression. Raises InputError, which says what to write instead, for any other value."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    if value is None:
        raise InputError("None cannot be appended; is a return missing in a helper function?")
    if hasattr(value, "run_batch"):
        raise InputError("a program cannot be appended; to run it on this state, call it: program(s, ...)")
    if hasattr(value, "var_scope"):
        raise InputError(
            "a state cannot be appended; append one of its values, s += state['name'], or "
            "to continue this text with another program call other(s, ...)"
        )
    if isinstance(value, Awaitable):
        if isinstance(value, Coroutine):
            value.close()  # nothing will await it
        raise InputError("a value must be awaited before it is appended: write s += await s['name']")
    if isinstance(value, AbstractContextManager):
        raise InputError("a copy is used in a with block: with s.copy() as c: c += ...")
    if isinstance(value, list | tuple):
        raise InputError(
            f"a {type(value).__name__} cannot be appended: append its items one by one, or concatenate them with +"
        )
    if isinstance(value, dict):
        raise InputError("a dict cannot be appended; write a message as a turn: s += user(...), s += assistant(...)")
    if isinstance(value, bytes):
        raise InputError("bytes cannot be appended; write data.decode()")
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise InputError(f"{name} is a function and cannot be appended: call it, {name}(...)")
    raise InputError(f"only text and expressions can be appended, not {type(value).__name__}; write str(...)")


def _describe(expr: Expr) -> str:
    """Returns a short form of an expression, as the program wrote it."""
    match expr:
        case Gen() | GenToolCall():
            return "gen()" if expr.name is None else f"gen({expr.name!r})"
        case Select():
            return "select()" if expr.name is None else f"select({expr.name!r})"
        case Text():
            return repr(expr.text)[:40]
        case Concat():
            return " + ".join(map(_describe, expr.parts))[:80]
    return type(expr).__name__


def role_turn(role: Role, expr: str | Expr) -> Expr:
    """Returns a whole turn of `role`."""
    return Concat((RoleBegin(role), *_parts(as_expr(expr)), RoleEnd(role)))


def _parts(expr: Expr) -> tuple[Expr, ...]:
    return expr.parts if isinstance(expr, Concat) else (expr,)
