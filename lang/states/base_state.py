"""`BaseState`: what plain and async states share: writing, looking variables up, and streams for event loops.

Inside the body a read sees what the body has written so far. Outside, a read first waits for what it needs: for the
variable to exist, or for the body to end. Then it raises the program's error, if there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from plait.lang.core.expressions import Expr, T, Typed, as_expr
from plait.lang.core.results import Segment
from plait.lang.core.roles import RoleMethods
from plait.lang.errors import ProgramError, missing_variable
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

_NAMES_OF_ASYNC_STATES = {"stream": "text_iter", "stream_partial": "partial_iter"}
_PRIMITIVE_NAMES = ("gen", "gen_int", "gen_string", "select", "separate_reasoning")


B = TypeVar("B", bound="BaseState")


class BaseState(RoleMethods):
    """Writes text, turns, variables and scopes, and explains attributes that do not exist.

    `is_external`: this handle is outside the body (the result of `run`).
    """

    def __init__(self, branch: Branch, *, is_external: bool = False) -> None:
        self._branch = branch
        self._run = branch.run
        self._is_external = is_external

    def __iadd__(self: B, other: str | Expr) -> B:
        """Appends text or an expression. Returns at once; the calls run in the runtime."""
        self._branch.append(as_expr(other))
        return self

    def _append(self, expr: Expr) -> None:
        self._branch.append(expr)

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
        start = self._branch.begin_scope(_checked_variable_name(name))
        yield
        self._branch.end_scope(name, start)

    def set_var(self, name: str, value: Any) -> None:
        """Sets variable `name` to any object. The text does not change. Raises InputError for an expression such as a
        gen, which runs only when it is appended."""
        self._branch.assign(_checked_variable_name(name), value)

    __setitem__ = set_var

    @property
    def arguments(self) -> dict[str, Any]:
        """What the program was called with, defaults included, by the names of its parameters."""
        return dict(self._run.arguments)

    def __contains__(self, name: object) -> bool:
        """Whether variable `name` exists; its call may still be running."""
        return name in self._branch.variables

    def __repr__(self) -> str:
        names = ", ".join(list(self._branch.variables))
        program = self._branch.run.program
        return f"<{type(self).__name__} of {program!r}: {len(self._branch.segments)} parts, variables: {names}>"

    def _repr_html_(self) -> str:
        """Returns the text as HTML for notebooks, as far as it is there."""
        from plait.lang.display.texts import state_html  # lazy: few programs need it

        self._run.check_has_run()
        return state_html(self._branch)

    def cancel(self) -> None:
        """Ends the calls of this state and of its forks at once. Inside the body the program continues without them;
        outside, the whole program ends. Reading the missing values afterwards raises ProgramError."""
        if self._is_external:
            self._run.abort()
        else:
            self._branch.cancel("this text was cancelled")

    def _forks(self: B, size: int, position_ids_offset: object) -> list[B]:
        """Returns the states of a fork. `position_ids_offset`: SGLang's; no model here needs position gaps, so only
        None and zeros are accepted."""
        if position_ids_offset is not None and not _is_zeros(position_ids_offset):
            raise InputError(
                "fork: position_ids_offset is not supported; every branch continues at the end of the text"
            )
        return [type(self)(branch) for branch in self._branch.fork(size)]

    # -- streams for event loops ------------------------------------------------------------------

    @overload
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, var_name: str, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]: ...
    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for an event loop; does not block a thread. Outside the body, cancelling the task that reads it
        aborts the program.

        With `return_meta_data` (needs a name) each item is (piece, meta). `meta` is {"finish_reason": None} until the
        call has ended; the last item is an empty piece with the complete meta info.

        >>> async for piece in state.text_async_iter("answer"): print(piece, end="")    # doctest: +SKIP
        """
        if return_meta_data and var_name is None:
            raise InputError("return_meta_data needs the name of a variable")
        return self._pieces(var_name, return_meta_data)

    async def _pieces(self, var_name: str | None, with_meta: bool) -> AsyncIterator[Any]:
        with self._marking_handled_errors(), self._ending_with_its_reader():
            if var_name is None:
                async for piece in self._stream_text_async():
                    yield piece
                return
            variable = await self._variable_async(var_name)
            async for piece in variable.aiter_text():
                yield (piece, {"finish_reason": None}) if with_meta else piece
            if with_meta:
                await variable.wait_ready()
                yield "", variable.meta()

    async def _stream_text_async(self) -> AsyncIterator[str]:
        segments, at = self._branch.text_segments(), 0
        while True:
            if self._is_external:
                await self._run.wait_async(partial(is_longer, segments, at))
            if at == len(segments):
                break
            fresh, at = segments[at:], len(segments)
            for segment in fresh:
                async for piece in segment.aiter_text():
                    yield piece
        if self._is_external:
            self._run.raise_if_failed()

    @overload
    def partial_async_iter(self, name: Typed[T]) -> AsyncIterator[T]: ...
    @overload
    def partial_async_iter(self, name: str) -> AsyncIterator[Any]: ...
    async def partial_async_iter(self, name: str | Typed[Any]) -> AsyncIterator[Any]:
        """`partial_iter` for an event loop. Outside the body, cancelling the task that reads it aborts the program."""
        with self._marking_handled_errors(), self._ending_with_its_reader():
            variable, last = await self._variable_async(name), None
            async for _ in variable.aiter_progress():
                value = variable.partial()
                if value is not None and (last is None or value != last):
                    yield value
                last = value

    # -- inside -----------------------------------------------------------------------------------

    async def _variable_async(self, name: str | Typed[Any]) -> Segment:
        """Returns a variable. Outside the body: waits until it exists."""
        if self._is_external and (awaited := awaited_name(name)) is not None:
            await self._run.wait_async(lambda: awaited in self._branch.variables)
        return self._get_variable(name)

    def _values(self) -> dict[str, Any]:
        """Returns the value of each variable. Waits for them."""
        with self._marking_handled_errors():
            return {name: variable.value() for name, variable in list(self._branch.variables.items())}

    def _get_variable(self, name: str | Typed[Any]) -> Segment:
        """Returns a variable that exists; of a typed handle, the result of its gen."""
        if isinstance(name, Typed):
            return self._typed_variable(name)
        if isinstance(name, Expr):
            raise InputError("a variable is read by its name, s['name'], or by a typed gen that was appended, s[p]")
        if not isinstance(name, str):
            raise InputError(f"a variable is read by its name or its typed gen, not by {name!r:.80}")
        if self._is_external:
            self._run.raise_if_failed()
        variable = self._branch.variables.get(name)
        if variable is None:
            raise missing_variable(self._run.program, name, list(self._branch.variables))
        return variable

    def _typed_variable(self, handle: Typed[Any]) -> Segment:
        if handle.name is None:
            type_name = handle.value_format and handle.value_format.type_name
            raise InputError(f"a typed gen without a name cannot be read: write gen('x', type={type_name})")
        variable = self._get_variable(handle.name)
        if not variable.has_format(handle.value_format):
            raise InputError(
                f"variable {handle.name!r} is not the value of this gen: it was set again, joined or sampled n times; "
                f"read s[{handle.name!r}]"
            )
        return variable

    @contextmanager
    def _marking_handled_errors(self) -> Iterator[None]:
        """Marks a ProgramError raised inside the body as handled: if the body continues, `run` does not raise it."""
        try:
            yield
        except ProgramError as error:
            if not self._is_external:
                self._run.mark_handled(error)
            raise

    @contextmanager
    def _ending_with_its_reader(self) -> Iterator[None]:
        """Outside the body: aborts the program if the task that reads a stream is cancelled, or by Ctrl-C."""
        try:
            yield
        except (asyncio.CancelledError, KeyboardInterrupt):
            if self._is_external:
                self._run.abort()
            raise


def is_longer(segments: list[Segment], length: int) -> bool:
    return len(segments) > length


def awaited_name(name: object) -> object:
    """Returns the variable that a read waits for; None for what the read refuses at once."""
    found = name.name if isinstance(name, Typed) else name
    return found if isinstance(found, str) else None


def _is_zeros(offsets: object) -> bool:
    return isinstance(offsets, list | tuple) and all(type(offset) is int and offset == 0 for offset in offsets)


def _public_names(state: object) -> list[str]:
    return [name for name in dir(type(state)) if not name.startswith("_")]


def _checked_variable_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of a variable must be non-empty text, not {name!r:.80}")
    return name
