"""`AsyncState`, the `s` of an `async def` body: written like any state, read with `await`; `AsyncStateGroup`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from plait.lang.core.expressions import T, Typed
from plait.lang.core.results import Segment
from plait.lang.core.tool_use.tool_calls import ToolResult
from plait.lang.errors import ProgramError
from plait.lang.meta_info import GenMeta
from plait.lang.states.base_state import BaseState
from plait.lang.states.fork_group import ForkGroup, JoinMode
from plait.lang.states.pending_read import Done, Pending, PendingUsage
from plait.lang.usage import ProgramUsage

R = TypeVar("R")


class AsyncState(BaseState):
    """The growing text of an async program. `s += ...` returns at once; every read is awaited and blocks no thread.

    >>> s += "The capital of France is" + gen("city", max_tokens=4)     # doctest: +SKIP
    >>> await s["city"]                                                 # doctest: +SKIP
    ' Paris.'
    """

    # -- reading ----------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Typed[T]) -> Coroutine[Any, Any, T]: ...
    @overload
    def __getitem__(self, name: str) -> Coroutine[Any, Any, Any]: ...
    def __getitem__(self, name: str | Typed[Any]) -> Coroutine[Any, Any, Any]:
        """`await s["x"]`, or `await s[p]` for a typed gen `p` that was appended."""
        variable = name.name if isinstance(name, Typed) else name
        return Pending(self.get_var(name), f"s[{variable!r}]")

    async def get_var(self, name: str | Typed[Any]) -> Any:
        """Waits for the value of a variable and returns it. Raises the same errors as ProgramState.get_var."""
        return await self._read(name, lambda variable: variable.value())

    async def text_of(self, name: str | Typed[Any]) -> str:
        """Returns the text of a variable as it was generated, whatever type its value has."""
        return await self._read(name, lambda variable: variable.text())

    @overload
    async def get_meta_info(self, name: Typed[Any]) -> GenMeta: ...
    @overload
    async def get_meta_info(self, name: str) -> Any: ...
    async def get_meta_info(self, name: str | Typed[Any]) -> Any:
        """Waits for the call of a variable and returns its meta info; see ProgramState.get_meta_info."""
        return await self._read(name, lambda variable: variable.meta())

    async def weight(self, name: str | Typed[Any]) -> Any:
        """Waits for a value and returns the log of its importance weight; see ProgramState.weight."""
        return await self._read(name, lambda variable: variable.weight())

    async def logprob(self, name: str | Typed[Any]) -> Any:
        """Waits for a value and returns its logprob under its constraint; see ProgramState.logprob."""
        return await self._read(name, lambda variable: variable.logprob())

    async def text(self) -> str:
        """Waits for all calls in the text and returns the whole text, chat template included."""
        await self._wait_for_text()
        return self._branch.read_text()

    async def messages(self) -> list[dict[str, str]]:
        """Waits for all calls in the turns and returns them as [{"role": ..., "content": ...}], an open turn
        included."""
        await self._wait_for_text()
        return self._branch.read_messages()

    async def sync(self) -> None:
        """Waits for every call so far (outside the body: for the whole program). Raises the first failure."""
        if not self._is_external:
            await self._wait_for_calls()
            return
        await self._wait_for_body_end()
        await self._run.wait_and_raise_async()

    async def error(self) -> ProgramError | None:
        """Waits like `sync`. Returns the error instead of raising it, or None."""
        try:
            await self.sync()
        except ProgramError as error:
            return error
        return None

    @property
    def variables(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """`await s.variables`: name -> value of each variable; see ProgramState.variables."""
        return Pending(self._read_variables(), "s.variables")

    async def _read_variables(self) -> dict[str, Any]:
        if self._is_external:
            await self._wait_for_body_end()
        with self._marking_handled_errors():
            for variable in list(self._branch.variables.values()):
                await variable.wait_ready()
        return self._values()

    @property
    def usage(self) -> PendingUsage:
        """`await s.usage`: the token counts over all calls of the program so far, forks included. Waits for them."""
        return PendingUsage(self._read_usage(), "s.usage")

    async def _read_usage(self) -> ProgramUsage:
        if self._is_external:
            await self._run.wait_for_end_async()
        for call_segment in self._run.call_segments():
            await call_segment.wait_finished()
        return self._branch.read_usage()

    @property
    def ret_value(self) -> Any:
        """The return value of the body; None until it has returned."""
        return self._run.ret_value

    def stream(self, name: str | None = None) -> AsyncIterator[str]:
        """Yields the text of a variable, or the whole text, in pieces as it is generated. Outside the body, cancelling
        the task that reads it aborts the program.

        >>> async for piece in s.stream("answer"): print(piece, end="")     # doctest: +SKIP
        """
        return self._pieces(name, with_meta=False)

    text_async_iter = stream  # type: ignore[assignment]  # without meta info

    @overload
    async def partial(self, name: Typed[T]) -> T | None: ...
    @overload
    async def partial(self, name: str) -> Any: ...
    async def partial(self, name: str | Typed[Any]) -> Any:
        """Returns the value of a variable as far as it is generated; see ProgramState.partial. Waits only until the
        variable exists."""
        with self._marking_handled_errors():
            return (await self._variable_async(name)).partial()

    @overload
    def stream_partial(self, name: Typed[T]) -> AsyncIterator[T]: ...
    @overload
    def stream_partial(self, name: str) -> AsyncIterator[Any]: ...
    def stream_partial(self, name: str | Typed[Any]) -> AsyncIterator[Any]:
        """Yields the partial values of a variable as they grow; the last one is the value itself. See
        ProgramState.partial_iter.

        >>> async for person in s.stream_partial("person"): print(person.name)          # doctest: +SKIP
        """
        return self.partial_async_iter(name)

    # -- acting -----------------------------------------------------------------------------------

    async def call(self, name: str, timeout: float | None = None) -> ToolResult | None:
        """Runs the tool that `gen(name, tools=...)` called, and appends its result. An async tool is awaited on this
        event loop; a plain one runs in a thread. See ProgramState.call."""
        with self._marking_handled_errors():
            return await self._branch.call_tool_async(name, await self._ready_variable(name), timeout)

    async def tool_result(self, name: str, value: Any) -> ToolResult:
        """Appends `value` as the result of the call that `gen(name, tools=...)` made; see ProgramState.tool_result."""
        return await self._read(name, lambda variable: self._branch.append_tool_result(name, variable, value))

    async def show(self, path: str | Path | None = None) -> Path | None:
        """Waits for the program and writes a trace of its calls, or shows it; see ProgramState.show."""
        from plait.lang.display.export import show  # lazy: few programs need it

        self._run.check_has_run()
        if self._is_external:
            await self._run.wait_for_end_async()
        for call_segment in self._run.call_segments():
            await call_segment.wait_finished()
        return show(self._run, path)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> AsyncStateGroup:
        """Returns `size` states that continue this text in parallel; join them with `await group.join()`."""
        return AsyncStateGroup(self._forks(size, position_ids_offset), self)

    @asynccontextmanager
    async def copy(self, position_ids_offset: object = None) -> AsyncIterator[AsyncState]:
        """A fork of one branch for the length of a block, joined at its end: `async with s.copy() as t: t += ...`."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0]._branch.close("an exception ended the block of this copy")
            raise
        await group.join()

    def abort(self, name: str | None = None) -> None:
        """Ends the call of variable `name`, or the whole program, at once. Reading the missing values afterwards raises
        ProgramError."""
        self._branch.abort_variable(name, None if name is None else self._get_variable(name))

    def __iter__(self) -> None:
        raise TypeError("a state is not iterable; read a variable with await s['name'], the text with s.stream()")

    # -- inside -----------------------------------------------------------------------------------

    async def _ready_variable(self, name: str | Typed[Any]) -> Segment:
        variable = await self._variable_async(name)
        await variable.wait_ready()
        return variable

    async def _read(self, name: str | Typed[Any], read: Callable[[Segment], R]) -> R:
        """Waits until a variable is complete, and returns what `read` takes from it."""
        with self._marking_handled_errors():
            return read(await self._ready_variable(name))

    async def _wait_for_body_end(self) -> None:
        await self._run.wait_for_end_async()
        self._run.raise_if_failed()

    async def _wait_for_text(self) -> None:
        """Waits for all calls in the text; outside the body, first for its end."""
        if self._is_external:
            await self._wait_for_body_end()
        with self._marking_handled_errors():
            for segment in list(self._branch.segments):
                await segment.wait_ready()

    async def _wait_for_calls(self) -> None:
        """Waits for all calls in the text, and for those of the branches that were joined."""
        await self._wait_for_text()
        with self._marking_handled_errors():
            for call_segment in self._branch.awaited_call_segments():
                await call_segment.wait_ready()


class AsyncStateGroup(ForkGroup[AsyncState]):
    """The branches that `s.fork(n)` returns in an async body: written like any group, joined with `await`."""

    def join(self, mode: JoinMode = "gather_variable") -> Awaitable[None]:
        """Brings the results of the branches to the forked state; see ProgramStateGroup.join. Nothing waits, so a
        forgotten `await` changes nothing."""
        self._join(mode)
        return Done()

    async def adopt(self, index: int) -> None:
        """Continues the forked state as branch `index`, when its calls have ended; see ProgramStateGroup.adopt."""
        winner = self._begin_adopt(index)
        await winner.sync()
        self._take_over(winner)
