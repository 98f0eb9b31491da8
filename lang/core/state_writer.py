"""`StateWriter`: the writing methods that plain and async states share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from plait.lang.core.expressions import Expr
from plait.lang.core.interpreter import execute
from plait.lang.core.results import AssignedValue, SegmentRange
from plait.lang.core.roles import RoleMethods
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

_NAMES_OF_ASYNC_STATES = {"stream": "text_iter", "stream_partial": "partial_iter"}
_PRIMITIVE_NAMES = ("gen", "gen_int", "gen_string", "select", "separate_reasoning")


class StateWriter(RoleMethods):
    """Writes turns, variables and scopes, and explains attributes that do not exist."""

    _branch: Branch

    def _append(self, expr: Expr) -> None:
        execute(expr, self._branch)

    if not TYPE_CHECKING:  # type checkers report these themselves

        def __add__(self, other: object) -> NoReturn:
            raise InputError("a state is extended in place: write s += ..., not s + ...")

        __radd__ = __add__

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes only. The message says what to write instead."""
            if name in _PRIMITIVE_NAMES:
                raise AttributeError(f"a state has no method {name!r}: write s += {name}(...)")
            branch = self.__dict__.get("_branch")
            if branch is not None and name in branch.variables:
                raise AttributeError(f"a state has no attribute {name!r}: read the variable with s[{name!r}]")
            meant = _NAMES_OF_ASYNC_STATES.get(name)
            if meant is not None and hasattr(type(self), meant):
                raise AttributeError(f"a state has no attribute {name!r} (did you mean {meant!r}?)")
            raise AttributeError(f"a state has no attribute {name!r}{did_you_mean(name, _public_names(self))}")

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """`with s.var_scope("x"): s += ...`: variable `x` is the text appended inside, from the end of the block
        on."""
        start = len(self._branch.segments)
        yield
        self._branch.set(_checked_variable_name(name), SegmentRange(self._branch.segments[start:]))

    def set_var(self, name: str, value: Any) -> None:
        """Sets variable `name` to any object. The text does not change. Raises InputError for an expression such as a
        gen, which runs only when it is appended."""
        if isinstance(value, Expr):
            raise InputError(f"s[{name!r}] = ... stores a value and runs nothing: append the expression, s += ...")
        self._branch.set(_checked_variable_name(name), AssignedValue(value))

    __setitem__ = set_var

    def __contains__(self, name: object) -> bool:
        """Whether variable `name` exists; its call may still be running."""
        return name in self._branch.variables

    def __repr__(self) -> str:
        names = ", ".join(list(self._branch.variables))
        program = self._branch.run.program
        return f"<{type(self).__name__} of {program!r}: {len(self._branch.segments)} parts, variables: {names}>"


def reject_position_ids_offset(position_ids_offset: object) -> None:
    """Checks SGLang's argument of fork and copy. Only None and zeros are accepted: no model here needs position
    gaps."""
    if position_ids_offset is None or _is_zeros(position_ids_offset):
        return
    raise InputError("fork: position_ids_offset is not supported; every branch continues at the end of the text")


def _is_zeros(offsets: object) -> bool:
    return isinstance(offsets, list | tuple) and all(type(offset) is int and offset == 0 for offset in offsets)


def _public_names(state: object) -> list[str]:
    return [name for name in dir(type(state)) if not name.startswith("_")]


def _checked_variable_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of a variable must be non-empty text, not {name!r:.80}")
    return name
