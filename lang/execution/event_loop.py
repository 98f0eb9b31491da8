"""Runs program bodies on an event loop: `async def` bodies as tasks, plain bodies in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from plait.lang.daemon_threads import DaemonThreads
from plait.lang.execution.dropped_states import abort_when_dropped
from plait.lang.execution.threads import MAX_AUTO_THREADS, progress
from plait.lang.states.state import ProgramState
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.execution.execution import Execution
    from plait.lang.states.async_state import AsyncState

MAX_CONCURRENT_PROGRAMS = 4096  # a runtime refuses calls when too many wait


async def run_async(execution: Execution) -> ProgramState:
    """Runs the body and waits for all calls. Raises ProgramError if the body or a call failed.

    If the task is cancelled, the program's calls are aborted.
    """
    await run_on_loop(execution)
    execution.run.raise_if_failed()
    return execution.state


async def run_all_async(
    executions: Sequence[Execution], concurrency: int | None, progress_bar: bool = False
) -> list[ProgramState]:
    """Runs all executions, at most `concurrency` at a time. Returns the states in the same order."""
    semaphore = asyncio.Semaphore(concurrency or MAX_CONCURRENT_PROGRAMS)
    with progress(len(executions), progress_bar) as step:

        async def run_one(execution: Execution) -> ProgramState:
            async with semaphore:
                await run_on_loop(execution)
            try:
                if execution.on_done is not None:
                    execution.on_done(execution.state)
            except Exception as error:  # of the checkpoint: it fails the item, not the batch
                execution.fail(error)
            step()
            return execution.state

        return list(await asyncio.gather(*map(run_one, executions)))


_tasks: set[asyncio.Task[None]] = set()  # an event loop holds its tasks weakly


def start(execution: Execution) -> AsyncState:
    """Starts the body as a task of the running event loop. Returns at once.

    The program ends when the returned state is dropped.
    """
    from plait.lang.states.async_state import AsyncState

    task = asyncio.get_running_loop().create_task(run_on_loop(execution))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    state = AsyncState(execution.branch, is_external=True)
    abort_when_dropped(state, execution.run)
    return state


def checked_concurrency(value: object) -> int | None:
    """Returns `value`, a max_concurrency argument. Raises InputError unless it is None or at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"max_concurrency must be None or at least 1, not {value!r:.80}")
    return value


async def run_on_loop(execution: Execution) -> None:
    """Runs the body and waits for all its calls. An Exception is stored in the run."""
    await execution.run_to_end(lambda: _run_body(execution), execution.run.wait_and_raise_async)


async def _run_body(execution: Execution) -> None:
    if not execution.is_async:
        await asyncio.get_running_loop().run_in_executor(_threads(), execution.run_body)
        return
    from plait.lang.states.async_state import AsyncState

    state = AsyncState(execution.branch)
    execution.run.ret_value = await execution.body(state, *execution.args, **execution.kwargs)


@cache
def _threads() -> DaemonThreads:
    """The pool for plain bodies. A body holds a thread while it runs, not while its last calls finish."""
    return DaemonThreads(MAX_AUTO_THREADS, "plait body")


def require_no_running_loop(instead: str = "await program.arun(...) or arun_batch(...) instead") -> None:
    """Raises InputError if this thread has a running event loop, which a wait would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InputError(f"an event loop runs in this thread: {instead}")
