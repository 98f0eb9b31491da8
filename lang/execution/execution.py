"""Runs a program's body once: in the caller's thread, in a separate thread, or as an item of a batch.

An exception of the body is stored in the run and raised where the result is read. KeyboardInterrupt and SystemExit
pass through, after the calls of the program were aborted.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.lang.budget import Budget
from plait.lang.core.branch import Branch
from plait.lang.core.run import Run
from plait.lang.core.waiting import finish, value_of
from plait.lang.errors import ProgramError, program_error
from plait.lang.execution.dropped_states import abort_when_dropped
from plait.lang.execution.event_loop import require_no_running_loop, run_on_loop
from plait.lang.program_arguments import named_arguments
from plait.lang.sampling_options import Options
from plait.lang.source_location import error_location
from plait.lang.states.state import ProgramState
from plait.runtime.errors import Aborted, InputError
from plait.runtime.seed_path import SeedPath

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient


class Execution:
    """One run of `body(s, *args, **kwargs)`. `state` is the handle that the caller reads."""

    def __init__(
        self,
        program: str,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        client: BackendClient,
        defaults: Options,
        budget: Budget | None = None,
        item: int = 0,
    ) -> None:
        """`item`: the number of the item in its batch."""
        self.run = Run(program, client, defaults, budget)
        self.run.arguments = named_arguments(body, args, kwargs)
        self.branch = Branch(self.run)
        self.branch.seed_path = SeedPath.of_item(item)
        self.state = ProgramState(self.branch, is_external=True)
        self.body = body
        self.args = args
        self.kwargs = kwargs
        self.on_done: Callable[[ProgramState], None] | None = None  # called at the end of a batch item
        self.is_async = inspect.iscoroutinefunction(body)

    def run_to_completion(self) -> ProgramState:
        """Runs the body in this thread and waits for all calls. Raises ProgramError if the body or a call failed, and
        InputError for an async body if an event loop runs in this thread."""
        self._run_to_end()
        self.run.raise_if_failed()
        return self.state

    def run_batch_item(self) -> ProgramState:
        """Like `run_to_completion`, for a batch item: an error is stored in the state and not raised."""
        try:
            self._run_to_end()
            if self.on_done is not None:
                self.on_done(self.state)
        except BaseException as error:  # in a worker thread SystemExit and the like belong to the item
            self.fail(error)
        return self.state

    def start(self) -> ProgramState:
        """Runs the body in a separate thread. Returns at once. The program ends when the returned state is dropped."""
        name, target = f"plait program {self.run.program}", self._run_to_end if self.is_async else self._run_in_thread
        threading.Thread(target=target, name=name, daemon=True).start()
        state = ProgramState(self.branch, is_external=True)  # the thread refers to the other one
        abort_when_dropped(state, self.run)
        return state

    def abort(self) -> None:
        """Aborts the program's calls. May be called from any thread."""
        self.run.abort()

    def _run_in_thread(self) -> None:
        try:
            self.run_body()
        except BaseException as error:
            self.fail(error)
        finally:
            self.run.end()

    def _run_to_end(self) -> None:
        """Runs the body in this thread, an async one on a new event loop, and waits for all its calls. An Exception is
        stored in the run."""
        if self.is_async:
            require_no_running_loop()
            asyncio.run(run_on_loop(self))
        else:
            finish(self.run_to_end(self.run_body, self.run.wait_and_raise))

    async def run_to_end(self, run_body: Callable[[], Any], wait: Callable[[], Any]) -> None:
        """Runs the body, then waits for all its calls. Either may return an awaitable. An Exception is stored in the
        run."""
        try:
            try:
                await value_of(run_body())
            finally:
                self.run.end()
            await value_of(wait())
        except Exception as error:
            self.fail(error)
        except BaseException:
            self.run.abort()
            raise

    def run_body(self) -> None:
        """Calls a plain (not async) body in this thread."""
        self.run.ret_value = self.body(ProgramState(self.branch), *self.args, **self.kwargs)

    def fail(self, error: BaseException) -> None:
        """Stores `error` as the error of the program; of one that was aborted, that it was, in place of what a session
        said that was closed meanwhile."""
        cause = error.__cause__ if isinstance(error, ProgramError) else error
        done = (error.steps, error.messages) if isinstance(error, ProgramError) else ((), ())
        if self.run.aborted and isinstance(cause, InputError):
            error = Aborted("the program was ended")
        if not isinstance(error, ProgramError) or error.program != self.run.program:
            error = program_error(self.run.program, None, error, error_location(error))
        error.steps, error.messages = done
        self.run.fail(error)
