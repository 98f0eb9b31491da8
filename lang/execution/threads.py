"""Runs the items of a batch in a thread pool, and returns their states in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Literal

from plait.host.terminal import bar_stream, shows_bars
from plait.lang.daemon_threads import DaemonThreads
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.execution.execution import Execution
    from plait.lang.states.state import ProgramState

MAX_AUTO_THREADS = 64
MAX_THREADS = 4096


def num_workers(num_threads: int | Literal["auto"], num_items: int) -> int:
    """Returns how many items run at a time. Threads mostly wait, so "auto" does not depend on the number of CPUs."""
    if num_threads == "auto":
        return max(1, min(MAX_AUTO_THREADS, num_items))
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or not 1 <= num_threads <= MAX_THREADS:
        raise InputError(f'num_threads must be "auto" or from 1 to {MAX_THREADS}, not {num_threads!r}')
    return min(num_threads, max(1, num_items))


def iter_in_order(executions: Sequence[Execution], workers: int, progress_bar: bool) -> Generator[ProgramState]:
    """Yields the states one by one, in order. The rest is aborted by closing the iterator early, and by Ctrl-C."""
    pool = DaemonThreads(workers, "plait batch")
    unfinished = set(range(len(executions)))
    with progress(len(executions), progress_bar) as step:
        try:
            futures = [pool.submit(_run_item, execution, step) for execution in executions]
            for index, future in enumerate(futures):
                state = future.result()
                unfinished.discard(index)
                yield state
        finally:
            pool.shutdown(cancel_futures=True)
            for index in unfinished:
                executions[index].abort()


def _run_item(execution: Execution, step: Callable[[], None]) -> ProgramState:
    """A callback of the future would be called when its waiter runs on, for the last item when the bar is closed."""
    try:
        return execution.run_batch_item()
    finally:
        step()


@contextmanager
def progress(total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows a progress bar for `total` items, if enabled; in a log, where no bar can move, a line now and then.

    Yields what to call after each item, in any thread.
    """
    if not enabled:
        yield lambda: None
    elif shows_bars():
        from tqdm import tqdm

        with tqdm(total=total, unit="item", file=bar_stream()) as bar:
            yield _locked(lambda: bar.update(1))
    else:
        from plait.runtime.process.runtime import PlainLines

        lines, done = PlainLines(time.monotonic()), count(1)
        yield _locked(lambda: lines.show((n := next(done)) / total, f"{n} of {total} items"))


def _locked(step: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that calls `step` in one thread at a time."""
    lock = threading.Lock()

    def locked() -> None:
        with lock:
            step()

    return locked
