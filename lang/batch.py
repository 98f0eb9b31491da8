"""Runs many executions at a time and keeps their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.execution import Execution
    from plait.lang.core.state import ProgramState

MAX_AUTO_THREADS = 64
MAX_THREADS = 4096


def num_workers(num_threads: int | Literal["auto"], num_items: int) -> int:
    """How many items run at a time. A thread mostly waits, so "auto" does not look at the processors."""
    if num_threads == "auto":
        return max(1, min(MAX_AUTO_THREADS, num_items))
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or not 1 <= num_threads <= MAX_THREADS:
        raise InputError(f'num_threads must be "auto" or from 1 to {MAX_THREADS}, not {num_threads!r}')
    return min(num_threads, max(1, num_items))


def run_all(executions: Sequence[Execution], workers: int, progress_bar: bool) -> list[ProgramState]:
    """The states in the order of `executions`. KeyboardInterrupt ends them all and comes through."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    pool = ThreadPoolExecutor(workers, thread_name_prefix="plait batch")
    try:
        with progress(len(executions), progress_bar) as step:
            futures = [pool.submit(execution.run_batch_item) for execution in executions]
            for _ in as_completed(futures):
                step()
            return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for execution in executions:
            execution.abort()
        raise
    finally:
        pool.shutdown(wait=False)


def iter_in_order(executions: Sequence[Execution], workers: int, progress_bar: bool) -> Iterator[ProgramState]:
    """The states one by one, in order. Closing the iterator early ends what is left."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(workers, thread_name_prefix="plait batch")
    left = set(range(len(executions)))
    try:
        with progress(len(executions), progress_bar) as step:
            futures = [pool.submit(execution.run_batch_item_any) for execution in executions]
            for index, future in enumerate(futures):
                state = future.result()
                left.discard(index)
                step()
                yield state
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for index in left:
            executions[index].abort()


@contextmanager
def progress(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """A bar for `total` items, if it is wanted; what is called after each item."""
    if not wanted:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="item") as bar:
        yield lambda: bar.update(1) and None
