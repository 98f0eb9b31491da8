"""Runs one program's body once: in the caller's thread, in a thread of its own, or as an item of a batch.

Whatever the body raises is kept in the run and raised where the result is read; only what ends a process
(KeyboardInterrupt, SystemExit) passes through, after the runtime was told to stop.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.lang.budget import Budget
from plait.lang.core.branch import Branch
from plait.lang.core.run import Run
from plait.lang.core.state import ProgramState
from plait.lang.errors import ProgramError, program_error
from plait.lang.sampling_options import Options
from plait.lang.source_location import error_location

if TYPE_CHECKING:
    from plait.runtime.client.client import Client


class Execution:
    """One run of `body(s, *args, **kwargs)`. `state` is what the caller reads."""

    def __init__(
        self,
        program: str,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        client: Client,
        defaults: Options,
        budget: Budget | None = None,
    ) -> None:
        self.run = Run(program, client, defaults, budget)
        self.branch = Branch(self.run)
        self.state = ProgramState(self.branch, is_external=True)
        self.body = body
        self.args = args
        self.kwargs = kwargs
        self.on_done: Callable[[ProgramState], None] | None = None  # of a batch's item
        self.is_async = inspect.iscoroutinefunction(body)

    def run_to_completion(self) -> ProgramState:
        """Runs the body here and waits for all calls. Raises ProgramError when it or one of them failed."""
        self._run_to_end()
        self.run.raise_if_failed()
        return self.state

    def run_batch_item(self) -> ProgramState:
        """`run_to_completion` for a batch: the error stays in the state."""
        try:
            self._run_to_end()
            if self.on_done is not None:
                self.on_done(self.state)
        except BaseException as error:  # a worker thread ends no process: the item has this error
            self.fail(error)
        return self.state

    def run_batch_item_any(self) -> ProgramState:
        """`run_batch_item` in a thread that has no event loop, whatever the body is."""
        if self.is_async:
            import asyncio

            from plait.lang.aio.execution import run_batch_item

            return asyncio.run(run_batch_item(self))
        return self.run_batch_item()

    def start(self) -> ProgramState:
        """Runs the body in a thread of its own and returns at once."""
        name = f"plait program {self.run.program}"
        threading.Thread(target=self._run_in_thread, name=name, daemon=True).start()
        return self.state

    def abort(self) -> None:
        """Ends the program's calls, from any thread."""
        self.run.abort()

    def _run_in_thread(self) -> None:
        try:
            self.run_body()
        except BaseException as error:
            self.fail(error)
        finally:
            self.run.end()

    def _run_to_end(self) -> None:
        """The body, then all its calls."""
        try:
            try:
                self.run_body()
            finally:
                self.run.end()
            self.run.wait_and_raise()
        except Exception as error:
            self.fail(error)
        except BaseException:
            self.run.abort()
            raise

    def run_body(self) -> None:
        """A plain body, in this thread."""
        self.run.ret_value = self.body(ProgramState(self.branch), *self.args, **self.kwargs)

    def fail(self, error: BaseException) -> None:
        """Keeps `error` as the program's."""
        if not isinstance(error, ProgramError) or error.program != self.run.program:
            error = program_error(self.run.program, None, error, error_location(error))
        self.run.fail(error)
