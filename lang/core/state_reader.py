"""Reading a state: its variables, its text and its turns, complete or as a stream.

Inside the body a read sees what the body has written so far. Outside, a read first waits for what it needs: for the
variable to exist, or for the body to end. Then it raises the program's error, if there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from plait.lang.core.expressions import Expr, T, Typed
from plait.lang.core.results import GenResult, Segment
from plait.lang.errors import ProgramError, missing_variable
from plait.lang.meta_info import GenMeta
from plait.lang.usage import ProgramUsage, total
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch


class StateReader:
    """The methods that read a state. `is_external`: this handle is outside the body (the result of `run`)."""

    def __init__(self, branch: Branch, is_external: bool) -> None:
        self._branch = branch
        self._run = branch.run
        self._is_external = is_external

    def get_var(self, name: str) -> Any:
        """Waits for the value of variable `name` and returns it. Raises ProgramError if its call or the program
        failed, and MissingVariable (also a KeyError) if there is no such variable."""
        with self._marking_handled_errors():
            return self._variable(name).value()

    def text_of(self, name: str | Typed[Any]) -> str:
        """Returns the text of variable `name` as it was generated, whatever type its value has."""
        with self._marking_handled_errors():
            return self._variable_or_typed(name).text()

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a state is not iterable; read a variable with s['name'], the text with s.text_iter()")

    @overload
    def get_meta_info(self, name: Typed[Any]) -> GenMeta: ...
    @overload
    def get_meta_info(self, name: str) -> Any: ...
    def get_meta_info(self, name: str | Typed[Any]) -> Any:
        """Waits for the call of a variable and returns its meta info: a GenMeta or a SelectMeta; for n > 1, and after a
        join, a list of them.

        They are dicts whose items are attributes too: finish_reason, prompt_tokens, cached_tokens, computed_tokens,
        completion_tokens and times in seconds; logprobs if they were requested; for a select the score of every choice.
        """
        with self._marking_handled_errors():
            return self._variable_or_typed(name).meta()

    def weight(self, name: str | Typed[Any]) -> Any:
        """Returns the log of a value's importance weight, for a gen with `particles` or `exact`, or a select; for n > 1
        a list.

        It is an unbiased estimate of the probability that the model, unconstrained, writes a valid value here
        (docs/constraints.md). Raises InputError for other values.

        >>> s += gen("label", regex="yes|no|not sure", particles=8)                 # doctest: +SKIP
        >>> math.exp(s.weight("label")), math.exp(s.logprob("label"))               # doctest: +SKIP
        (0.031, 0.82)
        """
        with self._marking_handled_errors():
            return self._variable_or_typed(name).weight()

    def logprob(self, name: str | Typed[Any]) -> Any:
        """Returns the logprob of a value given that the text is valid, log p(value) - weight; see `weight`."""
        with self._marking_handled_errors():
            return self._variable_or_typed(name).logprob()

    def text(self) -> str:
        """Waits for all calls in the text and returns the whole text, chat template included."""
        self._wait_for_end()
        with self._marking_handled_errors():
            return "".join(segment.text() for segment in list(self._branch.segments))

    def messages(self) -> list[dict[str, str]]:
        """Waits for all calls in the turns and returns them as [{"role": ..., "content": ...}], an open turn
        included."""
        self._wait_for_end()
        with self._marking_handled_errors():
            return [{"role": role, "content": content.text()} for role, content in self._branch.messages()]

    def sync(self) -> None:
        """Waits for every call so far (outside the body: for the whole program). Raises the first failure."""
        self._wait_for_end()
        if self._is_external:
            self._run.wait_and_raise()
            return
        with self._marking_handled_errors():
            for call_segment in self._branch.awaited_call_segments():
                call_segment.result()

    def error(self) -> ProgramError | None:
        """Waits like `sync`. Returns the error instead of raising it, or None."""
        try:
            self.sync()
        except ProgramError as error:
            return error
        return None

    @property
    def usage(self) -> ProgramUsage:
        """Token counts over all calls of the program so far, forks included. Waits for these calls, and outside the
        body for its end."""
        if self._is_external:
            self._run.wait_for_end()
        return total(self._run.call_segments())

    @property
    def ret_value(self) -> Any:
        """The return value of the body. Waits for its end. None inside the body."""
        self._wait_for_end()
        return self._run.ret_value

    # -- streaming --------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yields the text of a variable, or the whole text, in pieces as it is generated.

        With `run(..., stream=True)` the pieces arrive while the body runs. Raises ProgramError like any read. Outside
        the body, Ctrl-C while it waits aborts the program.
        """
        with self._marking_handled_errors(), self._ending_with_its_reader():
            yield from self._stream_text() if var_name is None else self._variable(var_name).iter_text()

    def _stream_text(self) -> Iterator[str]:
        segments, at = self._branch.segments, 0
        while True:
            if self._is_external:
                self._run.wait(partial(_is_longer, segments, at))
            if at == len(segments):
                break
            fresh, at = segments[at:], len(segments)
            for segment in fresh:
                yield from segment.iter_text()
        if self._is_external:
            self._run.raise_if_failed()

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
        if return_meta_data:
            if var_name is None:
                raise InputError("return_meta_data needs the name of a variable")
            return self._aiter_with_meta(var_name)
        return self._aiter_text() if var_name is None else self._aiter_variable(var_name)

    async def _aiter_variable(self, name: str) -> AsyncIterator[str]:
        with self._marking_handled_errors(), self._ending_with_its_reader():
            async for piece in (await self._variable_async(name)).aiter_text():
                yield piece

    async def _aiter_with_meta(self, name: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        with self._marking_handled_errors(), self._ending_with_its_reader():
            variable = await self._variable_async(name)
            async for piece in variable.aiter_text():
                yield piece, {"finish_reason": None}
            await variable.wait_ready()
            yield "", variable.meta()

    async def _aiter_text(self) -> AsyncIterator[str]:
        with self._marking_handled_errors(), self._ending_with_its_reader():
            async for piece in self._stream_text_async():
                yield piece

    async def _stream_text_async(self) -> AsyncIterator[str]:
        segments, at = self._branch.segments, 0
        while True:
            if self._is_external:
                await self._run.wait_async(partial(_is_longer, segments, at))
            if at == len(segments):
                break
            fresh, at = segments[at:], len(segments)
            for segment in fresh:
                async for piece in segment.aiter_text():
                    yield piece
        if self._is_external:
            self._run.raise_if_failed()

    # -- partial values ---------------------------------------------------------------------------

    @overload
    def partial(self, name: Typed[T]) -> T | None: ...
    @overload
    def partial(self, name: str) -> Any: ...
    def partial(self, name: str | Typed[Any]) -> Any:
        """Returns the value of a variable as far as it is generated; None if nothing is there yet. Waits only until the
        variable exists.

        A typed gen gives an object of its type: missing fields are None, nested objects and lists are partial too,
        texts are as far as they are, and everything else is left out until it is complete; see `plait.partial_value`.
        Validators have seen complete values only. A gen without a type gives its text so far.

        >>> state = extract.run(article, stream=True)                   # doctest: +SKIP
        >>> state.partial("person")                                     # doctest: +SKIP
        Person(name='Ada Lov', born=None)
        """
        with self._marking_handled_errors():
            return self._variable_or_typed(name).partial()

    @overload
    def partial_iter(self, name: Typed[T]) -> Iterator[T]: ...
    @overload
    def partial_iter(self, name: str) -> Iterator[Any]: ...
    def partial_iter(self, name: str | Typed[Any]) -> Iterator[Any]:
        """Yields the partial values of a variable as they grow. The last one is the value itself; where reading that
        raises, so does this. With `retries`, the values of the next attempt follow those of a refused one.

        >>> for person in state.partial_iter("person"): print(person.name)          # doctest: +SKIP
        """
        with self._marking_handled_errors(), self._ending_with_its_reader():
            variable, last = self._variable_or_typed(name), None
            for _ in variable.iter_progress():
                value = variable.partial()
                if value is not None and value != last:
                    yield value
                last = value

    @overload
    def partial_async_iter(self, name: Typed[T]) -> AsyncIterator[T]: ...
    @overload
    def partial_async_iter(self, name: str) -> AsyncIterator[Any]: ...
    async def partial_async_iter(self, name: str | Typed[Any]) -> AsyncIterator[Any]:
        """`partial_iter` for an event loop. Outside the body, cancelling the task that reads it aborts the program."""
        with self._marking_handled_errors(), self._ending_with_its_reader():
            await self._variable_async(str(name.name) if isinstance(name, Typed) else name)
            variable, last = self._variable_or_typed(name), None
            async for _ in variable.aiter_progress():
                value = variable.partial()
                if value is not None and value != last:
                    yield value
                last = value

    # -- inside -----------------------------------------------------------------------------------

    def _variable_or_typed(self, name: str | Typed[Any]) -> Segment:
        return self._typed_variable(name) if isinstance(name, Typed) else self._variable(name)

    def _wait_for_body(self) -> None:
        """Outside the body: waits for its end, successful or not."""
        if self._is_external:
            self._run.wait_for_end()

    def _wait_for_end(self) -> None:
        if self._is_external:
            self._run.wait_for_end()
            self._run.raise_if_failed()

    def _typed_variable(self, handle: Typed[Any]) -> GenResult:
        if handle.name is None:
            type_name = handle.value_format and handle.value_format.type_name
            raise InputError(f"a typed gen without a name cannot be read: write gen('x', type={type_name})")
        variable = self._variable(handle.name)
        if not isinstance(variable, GenResult) or not variable.has_format(handle.value_format):
            raise InputError(
                f"variable {handle.name!r} is not the value of this gen: it was set again, joined or sampled n times; "
                f"read s[{handle.name!r}]"
            )
        return variable

    def _variable(self, name: str) -> Segment:
        if self._is_external:
            self._run.wait(lambda: name in self._branch.variables)
        return self._get_variable(name)

    async def _variable_async(self, name: str) -> Segment:
        if self._is_external:
            await self._run.wait_async(lambda: name in self._branch.variables)
        return self._get_variable(name)

    def _get_variable(self, name: str) -> Segment:
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


def _is_longer(segments: list[Segment], length: int) -> bool:
    return len(segments) > length
