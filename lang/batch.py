"""Runs the items of a batch in a thread pool, and returns their states in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from plait.lang.daemon_threads import DaemonThreads
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.execution import Execution
    from plait.lang.core.state import ProgramState

MAX_AUTO_THREADS = 64
MAX_THREADS = 4096


def num_workers(num_threads: int | Literal["auto"], num_items: int) -> int:
    """Returns how many items run at a time. Threads mostly wait, so "auto" does not depend on the number of CPUs."""
    if num_threads == "auto":
        return max(1, min(MAX_AUTO_THREADS, num_items))
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or not 1 <= num_threads <= MAX_THREADS:
        raise InputError(f'num_threads must be "auto" or from 1 to {MAX_THREADS}, not {num_threads!r}')
    return min(num_threads, max(1, num_items))


def run_all(executions: Sequence[Execution], workers: int, progress_bar: bool) -> list[ProgramState]:
    """Returns the states in the order of `executions`. KeyboardInterrupt aborts them all and is raised again."""
    from concurrent.futures import as_completed

    pool = DaemonThreads(workers, "plait batch")
    try:
        with progress(len(executions), progress_bar) as step:
            futures = [pool.submit(execution.run_batch_item) for execution in executions]
            for _ in as_completed(futures):
                step()
            return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(cancel_futures=True)
        for execution in executions:
            execution.abort()
        raise


def iter_in_order(executions: Sequence[Execution], workers: int, progress_bar: bool) -> Iterator[ProgramState]:
    """Yields the states one by one, in order. Closing the iterator early aborts the rest."""
    pool = DaemonThreads(workers, "plait batch")
    unfinished = set(range(len(executions)))
    try:
        with progress(len(executions), progress_bar) as step:
            futures = [pool.submit(execution.run_batch_item_any) for execution in executions]
            for index, future in enumerate(futures):
                state = future.result()
                unfinished.discard(index)
                step()
                yield state
    finally:
        pool.shutdown(cancel_futures=True)
        for index in unfinished:
            executions[index].abort()


@contextmanager
def progress(total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows a progress bar for `total` items, if enabled. Yields the function to call after each item."""
    if not enabled:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="item") as bar:
        yield lambda: bar.update(1) and None
