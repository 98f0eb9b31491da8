"""Waits for events, and whether a process runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Waits until `condition()` is true. Returns False if it is not after `timeout_s` seconds.

    What takes long to ask, such as a request or a list of processes, is asked less often: the processor is for what
    the test waits for.
    """
    deadline = time.monotonic() + timeout_s
    while (began := time.monotonic()) < deadline:
        if condition():
            return True
        time.sleep(min(max(0.01, 2 * (time.monotonic() - began)), 0.05))
    return bool(condition())


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie: an orphan that has ended is one until the init process looks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
