"""Runs bodies on an event loop: `async def` ones as they are, plain ones in a thread while they have something to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

from plait.lang.batch import MAX_AUTO_THREADS, progress
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.aio.state import AsyncState
    from plait.lang.core.execution import Execution
    from plait.lang.core.state import ProgramState

MAX_CONCURRENT_PROGRAMS = 4096  # a runtime refuses calls when too many wait


async def run_async(execution: Execution) -> ProgramState:
    """Runs the body and waits for all calls. Raises ProgramError when it or one of them failed.

    Cancelling the task ends the program's calls at once.
    """
    await _run_to_end(execution)
    execution.run.raise_if_failed()
    return execution.state


async def run_batch_item(execution: Execution) -> ProgramState:
    """`run_async` for a batch: the error stays in the state."""
    await _run_to_end(execution)
    try:
        if execution.on_done is not None:
            execution.on_done(execution.state)
    except Exception as error:  # a full disk, a value that cannot be read: the item's, not the batch's
        execution.fail(error)
    return execution.state


async def run_all_async(
    executions: Sequence[Execution], concurrency: int | None, progress_bar: bool = False
) -> list[ProgramState]:
    """All of them, at most `concurrency` at a time; the states in order."""
    room = asyncio.Semaphore(concurrency or MAX_CONCURRENT_PROGRAMS)
    with progress(len(executions), progress_bar) as step:

        async def one(execution: Execution) -> ProgramState:
            async with room:
                state = await run_batch_item(execution)
            step()
            return state

        return list(await asyncio.gather(*map(one, executions)))


_tasks: set[asyncio.Task[None]] = set()  # an event loop holds its tasks weakly


def start(execution: Execution) -> AsyncState:
    """Starts the body as a task of its own and returns at once."""
    from plait.lang.aio.state import AsyncState

    task = asyncio.get_running_loop().create_task(_run_to_end(execution))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return AsyncState(execution.branch, is_external=True)


def run_in_new_loop(execution: Execution) -> ProgramState:
    """An async body for a caller who has no event loop."""
    require_no_running_loop()
    return asyncio.run(run_async(execution))


def run_all_in_new_loop(
    executions: Sequence[Execution], concurrency: int | None, progress_bar: bool
) -> list[ProgramState]:
    require_no_running_loop()
    return asyncio.run(run_all_async(executions, concurrency, progress_bar))


def start_loop_thread(execution: Execution) -> ProgramState:
    """An async body on an event loop in a thread of its own."""
    name = f"plait program {execution.run.program}"
    threading.Thread(target=lambda: asyncio.run(_run_to_end(execution)), name=name, daemon=True).start()
    return execution.state


def checked_concurrency(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InputError(f"max_concurrency must be None or at least 1, not {value!r:.80}")
    return value


async def _run_to_end(execution: Execution) -> None:
    """The body, then all its calls; an error is kept in the run."""
    try:
        try:
            await _run_body(execution)
        finally:
            execution.run.end()
        await execution.run.wait_and_raise_async()
    except Exception as error:
        execution.fail(error)
    except BaseException:
        execution.abort()
        raise


async def _run_body(execution: Execution) -> None:
    if not execution.is_async:
        await asyncio.get_running_loop().run_in_executor(_threads(), execution.run_body)
        return
    from plait.lang.aio.state import AsyncState

    state = AsyncState(execution.branch)
    execution.run.ret_value = await execution.body(state, *execution.args, **execution.kwargs)


@cache
def _threads() -> ThreadPoolExecutor:
    """For plain bodies. A thread is held while the body runs and reads, not while its last calls go on."""
    return ThreadPoolExecutor(MAX_AUTO_THREADS, thread_name_prefix="plait body")


def require_no_running_loop(instead: str = "await program.arun(...) or arun_batch(...) instead") -> None:
    """InputError where this thread has a running event loop, which waiting would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InputError(f"an event loop runs in this thread: {instead}")
