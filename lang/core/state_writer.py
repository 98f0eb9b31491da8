"""What every state can write: text, expressions, turns, variables of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from plait.lang.core.expressions import Expr
from plait.lang.core.interpreter import execute
from plait.lang.core.results import AssignedValue, SegmentRange
from plait.lang.core.roles import RoleMethods
from plait.lang.errors import did_you_mean
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

_PRIMITIVE_NAMES = ("gen", "gen_int", "gen_string", "select", "separate_reasoning")


class StateWriter(RoleMethods):
    """The part of a state that is about writing."""

    _branch: Branch

    def _append(self, expr: Expr) -> None:
        execute(expr, self._branch)

    if not TYPE_CHECKING:  # a checker says so itself

        def __add__(self, other: object) -> NoReturn:
            raise InputError("a state grows in place: write s += ..., not s + ...")

        __radd__ = __add__

        def __getattr__(self, name: str) -> NoReturn:
            """Only for names that are not there: what people write for something else says what to write."""
            if name in _PRIMITIVE_NAMES:
                raise AttributeError(f"a state has no method {name!r}: write s += {name}(...)")
            branch = self.__dict__.get("_branch")
            if branch is not None and name in branch.variables:
                raise AttributeError(f"a state has no attribute {name!r}: read the variable with s[{name!r}]")
            raise AttributeError(f"a state has no attribute {name!r}{did_you_mean(name, _public_names(self))}")

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """`with s.var_scope("x"): s += ...`: the text appended inside is variable `name` once the scope ends."""
        start = len(self._branch.segments)
        yield
        self._branch.set(_checked_variable_name(name), SegmentRange(self._branch.segments[start:]))

    def set_var(self, name: str, value: Any) -> None:
        """Sets variable `name` to any object. The text does not change. Raises InputError for a gen, which only runs
        where it is appended."""
        if isinstance(value, Expr):
            raise InputError(f"s[{name!r}] = ... keeps a value and runs nothing: append the expression, s += ...")
        self._branch.set(_checked_variable_name(name), AssignedValue(value))

    __setitem__ = set_var

    def __contains__(self, name: object) -> bool:
        """Whether variable `name` exists by now; its value may still be on its way."""
        return name in self._branch.variables

    def __repr__(self) -> str:
        names = ", ".join(list(self._branch.variables))
        program = self._branch.run.program
        return f"<{type(self).__name__} of {program!r}: {len(self._branch.segments)} parts, variables: {names}>"


def reject_position_ids_offset(position_ids_offset: object) -> None:
    """SGLang's argument of fork and copy: positions that jump are of use to no model here; those that do not are as
    they are."""
    if position_ids_offset is None or _is_zeros(position_ids_offset):
        return
    raise InputError("fork: position_ids_offset is not supported; every branch goes on where the text ends")


def _is_zeros(offsets: object) -> bool:
    return isinstance(offsets, list | tuple) and all(type(each) is int and each == 0 for each in offsets)


def _public_names(state: object) -> list[str]:
    return [name for name in dir(type(state)) if not name.startswith("_")]


def _checked_variable_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of a variable must be non-empty text, not {name!r:.80}")
    return name
