"""Reading a plain state: its variables, its text and its turns, complete or as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, overload

from plait.lang.core.expressions import T, Typed
from plait.lang.core.results import Segment
from plait.lang.errors import ProgramError
from plait.lang.meta_info import GenMeta
from plait.lang.states.base_state import BaseState, awaited_name, is_longer
from plait.lang.usage import ProgramUsage


class StateReader(BaseState):
    """The methods that read a state and wait in the caller's thread."""

    def get_var(self, name: str) -> Any:
        """Waits for the value of variable `name` and returns it. Raises ProgramError if its call or the program
        failed, and MissingVariable (also a KeyError) if there is no such variable."""
        with self._marking_handled_errors():
            return self._variable(name).value()

    def text_of(self, name: str | Typed[Any]) -> str:
        """Returns the text of variable `name` as it was generated, whatever type its value has."""
        with self._marking_handled_errors():
            return self._variable(name).text()

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
            return self._variable(name).meta()

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
            return self._variable(name).weight()

    def logprob(self, name: str | Typed[Any]) -> Any:
        """Returns the logprob of a value given that the text is valid, log p(value) - weight; see `weight`."""
        with self._marking_handled_errors():
            return self._variable(name).logprob()

    def text(self) -> str:
        """Waits for all calls in the text and returns the whole text, chat template included."""
        self._wait_for_end()
        with self._marking_handled_errors():
            return self._branch.read_text()

    def messages(self) -> list[dict[str, str]]:
        """Waits for all calls in the turns and returns them as [{"role": ..., "content": ...}], an open turn
        included."""
        self._wait_for_end()
        with self._marking_handled_errors():
            return self._branch.read_messages()

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
    def variables(self) -> dict[str, Any]:
        """Name -> value of each variable that the program generated or set, in the order of their names' first use.
        Waits for all of them, and raises like a read of each."""
        self._wait_for_end()
        return self._values()

    @property
    def usage(self) -> ProgramUsage:
        """Token counts over all calls of the program so far, forks included. Waits for these calls, and outside the
        body for its end."""
        self._wait_for_body()
        return self._branch.read_usage()

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
        segments, at = self._branch.text_segments(), 0
        while True:
            if self._is_external:
                self._run.wait(partial(is_longer, segments, at))
            if at == len(segments):
                break
            fresh, at = segments[at:], len(segments)
            for segment in fresh:
                yield from segment.iter_text()
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
            return self._variable(name).partial()

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
            variable, last = self._variable(name), None
            for _ in variable.iter_progress():
                value = variable.partial()
                if value is not None and (last is None or value != last):
                    yield value
                last = value

    # -- inside -----------------------------------------------------------------------------------

    def _wait_for_body(self) -> None:
        """Outside the body: waits for its end, successful or not."""
        if self._is_external:
            self._run.wait_for_end()

    def _wait_for_end(self) -> None:
        if self._is_external:
            self._run.wait_for_end()
            self._run.raise_if_failed()

    def _variable(self, name: str | Typed[Any]) -> Segment:
        """Returns a variable. Outside the body: waits until it exists."""
        if self._is_external and (awaited := awaited_name(name)) is not None:
            self._run.wait(lambda: awaited in self._branch.variables)
        return self._get_variable(name)
