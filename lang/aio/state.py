"""What an `async def` body holds as `s`: written like any state, read with `await`.

Knows: one strand, one run. Must not know: how nodes run, sockets, threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from plait.lang.aio.pending import Pending
from plait.lang.answers import Readable
from plait.lang.control.ending import end_branch
from plait.lang.errors import ProgramError
from plait.lang.expressions import T, Typed
from plait.lang.reading import Reading
from plait.lang.tools.calling import ToolResult, call_tool_async
from plait.lang.usage import ProgramUsage, total
from plait.lang.writing import Writing, no_offset

if TYPE_CHECKING:
    from plait.lang.aio.group import AsyncStateGroup
    from plait.lang.strand import Strand


class AsyncState(Writing):
    """The growing text of an async program. `s += ...` returns at once; every read is awaited, and holds no thread.

    >>> s += "The capital of France is" + gen("city", max_tokens=4)     # doctest: +SKIP
    >>> await s["city"]                                                 # doctest: +SKIP
    ' Paris.'
    """

    def __init__(self, strand: Strand, *, outside: bool = False) -> None:
        self._strand = strand
        self._run = strand.run
        self._outside = outside
        self._reading = Reading(strand, outside)

    # -- reading ----------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Typed[T]) -> Coroutine[Any, Any, T]: ...
    @overload
    def __getitem__(self, name: str) -> Coroutine[Any, Any, Any]: ...
    def __getitem__(self, name: str | Typed[Any]) -> Coroutine[Any, Any, Any]:
        """`await s["x"]`, or of a typed gen `p` that was appended `await s[p]`."""
        of = name.name if isinstance(name, Typed) else name
        return Pending(self.get_var(name), f"s[{of!r}]")

    async def get_var(self, name: str | Typed[Any]) -> Any:
        """The value of a variable, once it is there. Raises like a read of ProgramState."""
        with self._reading._body_may_handle():
            return (await self._arrived(name)).value()

    async def text_of(self, name: str | Typed[Any]) -> str:
        """The text of a variable, whatever its value was read as."""
        with self._reading._body_may_handle():
            return (await self._arrived(name)).text()

    async def get_meta_info(self, name: str) -> Any:
        """What is known of the call behind variable `name`; see ProgramState.get_meta_info."""
        with self._reading._body_may_handle():
            return (await self._arrived(name)).meta()

    async def text(self) -> str:
        """The whole text, the chat template's own included."""
        await self._all()
        return "".join(segment.text() for segment in list(self._strand.segments))

    async def messages(self) -> list[dict[str, str]]:
        """The turns as [{"role": ..., "content": ...}], one still open included."""
        await self._all()
        return [{"role": role, "content": content.text()} for role, content in self._strand.messages()]

    async def sync(self) -> None:
        """Waits for every call so far (outside the body: for the whole program); raises the first failure."""
        if not self._outside:
            await self._all()
            return
        await self._ended()
        await self._run.settle_async()

    async def error(self) -> ProgramError | None:
        """Waits like `sync`; gives the error instead of raising it, or None."""
        try:
            await self.sync()
        except ProgramError as error:
            return error
        return None

    async def usage(self) -> ProgramUsage:
        """Tokens of all calls of the program so far, forks included, once they are done."""
        if self._outside:
            await self._run.wait_async(_never)
        for answer in (answers := self._run.answers()):
            await answer.finish()
        return total(answers)

    @property
    def ret_value(self) -> Any:
        """What the body returned; None until it has."""
        return self._run.ret_value

    def stream(self, name: str | None = None) -> AsyncIterator[str]:
        """The text of a variable, or the whole text, in pieces as it comes.

        >>> async for piece in s.stream("answer"): print(piece, end="")     # doctest: +SKIP
        """
        return self._reading.text_async_iter(name)

    text_async_iter = stream

    # -- acting -----------------------------------------------------------------------------------

    async def call(self, name: str) -> ToolResult | None:
        """Runs the tool that `gen(name, tools=...)` called and appends its result. An async tool is awaited on this
        loop, a plain one runs in a thread. See ProgramState.call."""
        with self._reading._body_may_handle():
            variable = await self._variable(name)
            await variable.arrive()
            return await call_tool_async(self._strand, name, variable)

    def fork(self, size: int = 1, position_ids_offset: object = None) -> AsyncStateGroup:
        """`size` states that go on from this text side by side; `await group.join()` brings them together."""
        from plait.lang.aio.group import AsyncStateGroup

        no_offset(position_ids_offset)
        return AsyncStateGroup([AsyncState(strand) for strand in self._strand.fork(size)], self)

    @asynccontextmanager
    async def copy(self, position_ids_offset: object = None) -> AsyncIterator[AsyncState]:
        """One branch for a side thought: `async with s.copy() as t: t += ...`, joined at the end."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0]._strand.close("this copy was left by an exception")
            raise
        await group.join()

    def cancel(self) -> None:
        """Ends this text at once: its calls, and those of its branches. Inside the body the program goes on without
        it; outside, the program ends. What is read of it afterwards raises."""
        if self._outside:
            self._run.abort()
        else:
            end_branch(self._strand, "this text was cancelled")

    def abort(self, name: str | None = None) -> None:
        """Ends the call of variable `name`, or the whole program, at once; what is read afterwards raises."""
        if name is None:
            self._run.abort()
        else:
            self._reading._existing(name).abort()

    def __iter__(self) -> None:
        raise TypeError("a state is not iterable; read a variable with await s['name'], the text with s.stream()")

    # -- inside -----------------------------------------------------------------------------------

    async def _variable(self, name: str) -> Readable:
        return await self._reading._variable_async(name)

    async def _arrived(self, name: str | Typed[Any]) -> Readable:
        if isinstance(name, Typed):
            if name.name is not None:
                await self._variable(name.name)
            variable: Readable = self._reading._of_handle(name)
        else:
            variable = await self._variable(name)
        await variable.arrive()
        return variable

    async def _ended(self) -> None:
        await self._run.wait_async(_never)
        self._run.check()

    async def _all(self) -> None:
        """Waits for everything in the text; outside, for the body's end first."""
        if self._outside:
            await self._ended()
        with self._reading._body_may_handle():
            for segment in list(self._strand.segments):
                await segment.arrive()


_never = partial(bool, False)
