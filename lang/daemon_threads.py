"""Threads for what programs do in parallel: bodies, tools, requests to services. Python's end does not wait for them.

It does wait for the threads of `concurrent.futures` and `asyncio.to_thread`: after Ctrl-C a batch would keep the
process alive until its last body returns from a slow tool.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads(Executor):
    """Runs at most `max_workers` functions at a time, in the order in which they come. A thread ends when none waits.

    >>> DaemonThreads(4, "plait batch").submit(len, "abc").result()
    3
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_threads = 0
        self._is_shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Returns the future of `fn(*args, **kwargs)`. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("these threads have been shut down")
            self._waiting.append((future, functools.partial(fn, *args, **kwargs)))
            if self._num_threads < self._max_workers:
                self._start_thread()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Takes no more functions. It never waits for those that run."""
        with self._lock:
            self._is_shut_down = True
            cancelled = list(self._waiting) if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
        for future, _ in cancelled:
            future.cancel()

    def _start_thread(self) -> None:
        """Raises RuntimeError if the system starts no more threads and none runs that could do the work."""
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:
            if self._num_threads == 0:
                self._waiting.pop()
                raise
        else:
            self._num_threads += 1

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                future, function = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except StopIteration as error:  # an asyncio future of Python 3.11 takes none, and would never end
                stopped = RuntimeError("the function raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:  # it belongs to whoever reads the result
                future.set_exception(error)
            del future, function  # they must not live until the next one comes


async def run_in_daemon_thread(function: Callable[..., T], /, **arguments: Any) -> T:
    """`asyncio.to_thread`, with a thread for which neither the event loop nor Python waits at its end."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    work = functools.partial(context.run, functools.partial(function, **arguments))
    return await loop.run_in_executor(DaemonThreads(1, "plait tool"), work)
