"""Runs the items of a batch in a thread pool, and returns their states in order."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from plait.host.terminal import shows_bars
from plait.lang.daemon_threads import DaemonThreads
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.execution.execution import Execution
    from plait.lang.states.state import ProgramState

MAX_AUTO_THREADS = 64
MAX_THREADS = 4096
LINE_INTERVAL_S = 10.0  # between two lines about a batch in a log


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
            futures = [pool.submit(execution.run_batch_item_any) for execution in executions]
            for future in futures:
                future.add_done_callback(step)
            for index, future in enumerate(futures):
                state = future.result()
                unfinished.discard(index)
                yield state
        finally:
            pool.shutdown(cancel_futures=True)
            for index in unfinished:
                executions[index].abort()


@contextmanager
def progress(total: int, enabled: bool) -> Iterator[Callable[..., None]]:
    """Shows a progress bar for `total` items, if enabled; in a log, where no bar can move, a line now and then.

    Yields what to call after each item, in any thread.
    """
    if not enabled:
        yield lambda *_: None
        return
    if not shows_bars():
        yield _line_writer(total)
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, unit="item") as bar:

        def step(*_: object) -> None:
            with lock:
                bar.update(1)

        yield step


def _line_writer(total: int) -> Callable[..., None]:
    """Returns what counts an item, and writes at most one line in LINE_INTERVAL_S to standard error."""
    lock, started = threading.Lock(), time.monotonic()
    done, written_at = 0, started

    def step(*_: object) -> None:
        nonlocal done, written_at
        with lock, contextlib.suppress(OSError, ValueError):  # standard error may be closed
            done, now = done + 1, time.monotonic()
            if now - written_at >= LINE_INTERVAL_S:
                written_at = now
                print(f"plait: {done} of {total} items, after {now - started:.0f} s", file=sys.stderr, flush=True)

    return step
