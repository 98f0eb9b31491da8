"""`@function` and `Program`: a Python function that can be run, streamed, batched and compiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

from plait.lang.backends.cluster import Cluster
from plait.lang.backends.default_backend import Backend, resolve_client
from plait.lang.budget import Budget, checked_budget
from plait.lang.display.texts import states_html
from plait.lang.errors import unknown_keyword
from plait.lang.execution.event_loop import checked_concurrency, run_all_async, run_async, start
from plait.lang.execution.execution import Execution
from plait.lang.execution.threads import num_workers
from plait.lang.gen_keywords import RunKeywords
from plait.lang.html.render import ShownList
from plait.lang.program_arguments import ProgramArguments
from plait.lang.program_batch import ProgramBatch
from plait.lang.sampling_options import Options, run_options
from plait.lang.states.async_state import AsyncState
from plait.lang.states.state import ProgramState
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.tracing.graph import Graph
    from plait.runtime.programs.backend import BackendClient

P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")


class Program(Generic[P]):
    """A program, made by `@function` from a function whose first parameter is the state.

    `P` are the function's other parameters.

    >>> state = qa.run(question="Why is the sky blue?", temperature=0)   # doctest: +SKIP
    >>> print(state["answer"])                                           # doctest: +SKIP
    """

    def __init__(
        self,
        body: Callable[Concatenate[S, P], Any],
        bound: Mapping[str, Any] | None = None,
        async_body: Callable[..., Any] | None = None,
    ) -> None:
        """`bound`: arguments that `bind` has set. `async_body`: for the states of async programs, if it is another."""
        self.name = getattr(body, "__name__", "program")
        self._arguments = ProgramArguments(self.name, _checked_signature(self.name, body), bound or {})
        self._body: Callable[..., Any] = body
        self._async_body = async_body
        functools.update_wrapper(self, body)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Program[P]: ...
    @overload
    def __get__(self: Program[Concatenate[S, Q]], instance: object, owner: type | None = None) -> Program[Q]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Program[Any]:
        """Makes a program that is defined in a class a method: its body takes `self` first, then the state."""
        if instance is None:
            return self
        return Program(self._body.__get__(instance, owner), self._arguments.bound, self._async_body)

    def _sampling_keywords(self, **keywords: Unpack[RunKeywords]) -> None:
        """Declares the types of the sampling keywords for `plait.mypy_plugin`; never called."""

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | None = None,
        budget: Budget | None = None,
        use_thread: Literal[True] = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Runs the body with `args` and `kwargs`, and waits for all its calls.

        The sampling keywords of `gen` (n, stop, temperature, seed, timeout and so on; max_tokens may be called
        max_new_tokens here) are not passed to the body. They are defaults that each gen may override. A parameter of
        the body that has the name of one is an argument here; the sampling keyword is given as `sampling={"n": 4}`.

        - `chat_template_kwargs`: further variables of the model's chat template, for the turns of this run, such as
          `{"enable_thinking": False}` for Qwen3. The values become part of the template's own text.
        - `stream=True` returns at once: the body runs in a thread, and `text_iter` yields the text as it is generated.
          The program is aborted if the returned state and its streams are garbage-collected before the end.
        - `backend`: a Runtime, Engine or Client to use instead of the default one.
        - `budget`: a limit for all calls of the program together. When it is spent, the calls end, and reads raise a
          ProgramError whose `__cause__` is BudgetExceeded.
        - `use_thread` exists for programs written for SGLang. Calls always run in parallel to the body.

        Raises InputError for a wrong argument before anything runs, and ProgramError if the body or a call fails.
        """
        if use_thread is not True:
            raise unknown_keyword("run", "use_thread", ())
        execution = self._execution("run", args, kwargs, stream, backend, budget)
        return execution.start() if stream else execution.run_to_completion()

    def _execution(
        self,
        where: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        stream: object,
        backend: Backend | None,
        budget: Budget | None,
    ) -> Execution:
        """Returns one run of the body, which was not started. Raises InputError for a wrong argument."""
        sampling, kwargs = self._arguments.split_sampling(where, kwargs)
        options = run_options(where, sampling)
        self._arguments.check(f"program {self.name!r}", args, kwargs)
        if not isinstance(stream, bool):
            raise InputError(f"{where}: stream must be True or False, not {stream!r:.80}")
        client = self._client(where, backend, options)
        kwargs = self._arguments.with_bound(args, kwargs)
        return Execution(self.name, self._body, args, kwargs, client, options, checked_budget(where, budget))

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        backend: Backend | Cluster | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        budget: Budget | None = None,
        generator_style: Literal[True],
        **sampling: Unpack[RunKeywords],
    ) -> Iterator[ProgramState]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        backend: Backend | Cluster | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        budget: Budget | None = None,
        generator_style: Literal[False] = False,
        resume: str | Path | None = None,
        **sampling: Unpack[RunKeywords],
    ) -> list[ProgramState]: ...
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        backend: Backend | Cluster | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        budget: Budget | None = None,
        generator_style: bool = False,
        resume: str | Path | None = None,
        **sampling: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Runs the body once for each dict of keyword arguments, many at a time. Returns the states in order.

        An item that fails does not end the others: `error()` of its state returns the error, and every other read
        raises it. A prefix that the items share is computed once. The sampling keywords are those of `run` and apply to
        all items.

        - `backend`: as in `run`, or a Cluster, whose actors then run the items. The arguments are JSON values then, and
          the program is at the top level of a file or a module.
        - `num_threads`: how many items run at a time, on each actor of a Cluster; "auto" means at most 64.
        - `budget`: a limit for each item.
        - `generator_style=True`: returns an iterator over the states, in order; each comes when it and those before it
          have ended. Closing the iterator aborts the other items.
        - `resume`: a file to which each finished item is added as a line of JSON. Items that are already in the file
          are not run again: their whole states are read from it. An item with a value that cannot be saved is not
          added, with a warning.

        Raises InputError before anything runs if the arguments of an item do not fit the program.

        >>> states = qa.run_batch([{"question": q} for q in questions], progress_bar=True)   # doctest: +SKIP
        >>> answers = [None if s.error() else s["answer"] for s in states]                   # doctest: +SKIP
        """
        batch = self._batch("run_batch", batch_kwargs, sampling, budget, num_threads)
        if not isinstance(generator_style, bool):
            raise InputError(f"run_batch: generator_style must be True or False, not {generator_style!r:.80}")
        if generator_style and resume is not None:
            raise InputError("run_batch: resume cannot be combined with generator_style")
        if not batch.items:
            return iter(()) if generator_style else []
        if resume is not None:
            from plait.lang.batches.checkpoint import BatchCheckpoint

            batch = replace(batch, log=BatchCheckpoint(resume, self.name, self._body, batch.items, batch.options))
        return batch.iter_states(backend, progress_bar) if generator_style else batch.run(backend, progress_bar)

    def _batch(
        self,
        where: str,
        batch_kwargs: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        budget: Budget | None,
        num_threads: int | Literal["auto"] = "auto",
    ) -> ProgramBatch:
        """Returns a batch that did not begin. Raises InputError for a wrong argument."""
        given = self._arguments.only_sampling(where, sampling)
        options, budget = run_options(where, given), checked_budget(where, budget)
        items = dict(enumerate(self._arguments.checked_items(batch_kwargs)))
        num_workers(num_threads, len(items))
        return ProgramBatch(self, items, given, options, budget, num_threads)

    @overload
    async def arun(
        self,
        *args: Any,
        stream: Literal[False] = False,
        backend: Backend | None = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> ProgramState: ...
    @overload
    async def arun(
        self,
        *args: Any,
        stream: Literal[True],
        backend: Backend | None = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> AsyncState: ...
    async def arun(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | None = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> ProgramState | AsyncState:
        """`run` for an event loop: waits for all calls without blocking the loop. Cancelling the task aborts the calls.

        An `async def` body runs on the event loop. A plain body runs in a thread, which is released when the body
        returns, even if calls are still running.

        `stream=True` returns an AsyncState at once; the body runs as a separate task. It is aborted if the state and
        its streams are garbage-collected before the end.

        >>> state = await qa.arun(question="Why is the sky blue?")                       # doctest: +SKIP
        """
        execution = self._execution("arun", args, kwargs, stream, backend, budget)
        return start(execution) if stream else await run_async(execution)

    async def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]],
        *,
        backend: Backend | None = None,
        max_concurrency: int | None = None,
        progress_bar: bool = False,
        budget: Budget | None = None,
        **sampling: Unpack[RunKeywords],
    ) -> list[ProgramState]:
        """`run_batch` for an event loop. At most `max_concurrency` items run at a time (4,096 if it is None)."""
        batch = self._batch("arun_batch", batch_kwargs, sampling, budget)
        concurrency = checked_concurrency(max_concurrency)
        client = self._client("arun_batch", backend, batch.options) if batch.items else None
        executions = [] if client is None else batch.executions(client, batch.items)
        return ShownList(states_html, await run_all_async(executions, concurrency, progress_bar))

    def compile(self, *args: Any, backend: Backend | None = None, **kwargs: Any) -> Graph:
        """Checks the program and returns its graph: its texts, gens, selects, forks and joins, and the flow of values.

        The body runs once, without a model. The values that it reads, and arguments that are not given, are
        placeholders for values that are known at run time only. The sampling keywords are those of `run`. `backend`: a
        runtime whose chat template is used to check the turns.

        Raises CompileError, which names the line of each problem: a variable that is never set, an invalid constraint,
        branches that are never joined or read, an exception of the body. Raises DependsOnValue if what the body does
        next depends on a value that is known at run time only.

        >>> print(qa.compile())                                          # doctest: +SKIP
        >>> qa.compile().json(question="Why is the sky blue?")           # doctest: +SKIP
        """
        from plait.lang.tracing.tracer import compile_body

        sampling, kwargs = self._arguments.split_sampling("compile", kwargs)
        options = run_options("compile", sampling)
        kwargs = self._arguments.with_bound(args, kwargs)
        self._arguments.check(f"program {self.name!r}", args, kwargs, allow_missing=True)
        bound = self._arguments.signature.bind_partial(None, *args, **kwargs)
        template = None if backend is None else self._client("compile", backend, options).tokenizer.chat_template
        return compile_body(self.name, self._body, bound, options, template)

    def trace(self, *, backend: Backend | None = None, **kwargs: Any) -> Graph:
        """SGLang's name for `compile`."""
        return self.compile(backend=backend, **kwargs)

    def cache(self, backend: Backend | None = None) -> int:
        """Computes the prefix that all runs of the program share, and keeps it in the prefix cache.

        Returns how many of its tokens were not cached yet. Compiles the program to find the prefix. Without this call,
        the first run caches it.

        >>> qa.cache(); qa.run(question="Why?").usage.cached_tokens      # doctest: +SKIP
        """
        from plait.lang.tracing.tracer import warm_prefix

        return warm_prefix(self.compile(backend=backend).prefix, resolve_client(backend))

    def bind(self, **arguments: Any) -> Program[P]:
        """Returns the same program with these arguments set. Arguments of `run` and the other methods override them.

        >>> french = qa.bind(language="French")                          # doctest: +SKIP
        """
        self._arguments.check_bind(arguments)
        return Program(self._body, {**self._arguments.bound, **arguments}, self._async_body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`program(...)` is `program.run(...)`. `program(s, ...)` runs the body on the state of another program.

        The body then continues the text of `s`, and its return value is returned (for an `async def` body, an
        awaitable).
        """
        if args and isinstance(args[0], ProgramState | AsyncState):
            self._arguments.check(f"program {self.name!r}", args[1:], kwargs)
            is_async, body = isinstance(args[0], AsyncState), self._body
            if is_async and self._async_body is not None:
                body = self._async_body
            self._check_async_matches(body, is_async)
            return body(*args, **self._arguments.with_bound(args[1:], kwargs))
        return self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<plait program {self.name!r}>"

    def _client(self, where: str, backend: Backend | None, options: Options) -> BackendClient:
        """Returns the client to use. Raises InputError if `options` are invalid for its model."""
        client = resolve_client(backend)
        try:
            options.check_as_defaults(client.model.vocab_size)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return client

    def _check_async_matches(self, body: Callable[..., Any], is_async: bool) -> None:
        """Raises InputError unless body and state are both async or both plain. `is_async`: whether the state is."""
        if inspect.iscoroutinefunction(body) and not is_async:
            raise InputError(f"program {self.name!r} is async def, so it needs the state of an async def program")
        if is_async and not inspect.iscoroutinefunction(body):
            raise InputError(f"program {self.name!r} is a plain function, so it needs the state of a plain program")


@overload
def function(body: Callable[Concatenate[S, P], Any]) -> Program[P]: ...
@overload
def function(body: Callable[..., Any]) -> Program[...]: ...  # for a body with **kwargs, which the first does not match
@overload
def function(*, num_api_spec_tokens: None = None) -> Callable[[Callable[Concatenate[S, P], Any]], Program[P]]: ...
def function(
    body: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None
) -> Program[Any] | Callable[[Callable[..., Any]], Program[Any]]:
    """Returns a program made from a function whose first parameter is the state.

    In a class it makes a method: `def answer(self, s, question)`, called as `agent.answer.run("Why?")`.

    >>> @function
    ... def qa(s, question):
    ...     s += "Q: " + question + "\\nA:" + gen("answer", stop="\\n")
    >>> qa.name
    'qa'
    """
    if num_api_spec_tokens is not None:
        raise unknown_keyword("function", "num_api_spec_tokens", ())
    return Program if body is None else Program(body)


def _checked_signature(name: str, body: object) -> inspect.Signature:
    if not callable(body) or isinstance(body, (type, Program)):
        raise InputError(f"@function decorates a function, not {body!r:.80}")
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise InputError(f"program {name!r} must be a function without yield")
    signature = inspect.signature(body)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise InputError(f"program {name!r} needs the state as its first parameter: def {name}(s, ...)")
    return signature
