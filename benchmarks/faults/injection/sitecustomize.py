"""Makes parts of plait fail at random in every process that has this folder in PYTHONPATH, for the soak.

Python imports a module of this name when it starts. PLAIT_FAULT_FOLDER names a folder: nothing fails before it contains
a file `active`, and every failure appends a byte to the file of its name there.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from functools import wraps
from typing import Any

FOLDER = os.environ.get("PLAIT_FAULT_FOLDER", "")
PROBABILITY = {"step": 2e-4, "sampler": 5e-4, "mask": 1e-3, "preemption": 1e-2, "log": 1e-2}  # of one call


class InjectedFault(RuntimeError):
    """A failure that the soak caused."""


def occurs(name: str) -> bool:
    """Whether the fault `name` occurs now. Counts it."""
    if random.random() >= PROBABILITY[name] or not os.path.exists(os.path.join(FOLDER, "active")):
        return False
    with open(os.path.join(FOLDER, name), "ab") as counter:
        counter.write(b"+")
    return True


def raising(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if occurs(name):
            raise InjectedFault(f"injected: {name}")
        return function(*args, **kwargs)

    return wrapped


def preempting(next_batch: Callable[..., Any]) -> Callable[..., Any]:
    """A running request loses its pages, as when the pool is too small."""

    @wraps(next_batch)
    def wrapped(self: Any) -> Any:
        if self.running and occurs("preemption"):
            self.retract(random.choice(list(self.running)))
        return next_batch(self)

    return wrapped


class FullDisk:
    """The module `os`, whose writes find the disk full at random."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        if occurs("log"):
            raise OSError(errno.ENOSPC, "injected: log")
        return os.write(fd, data)


def inject() -> None:
    from plait.runtime import log_writer
    from plait.runtime.executor.packed_cpu_runner import PackedCpuRunner
    from plait.runtime.sampling.sampler import Sampler
    from plait.runtime.scheduler.policy.batching import BatchScheduler
    from plait.runtime.scheduler.token_mask import TokenMaskBuilder

    log_writer.os = FullDisk()
    for owner, method, name in (
        (PackedCpuRunner, "forward", "step"),
        (Sampler, "sample", "sampler"),
        (TokenMaskBuilder, "fill", "mask"),
    ):
        setattr(owner, method, raising(name, getattr(owner, method)))
    BatchScheduler.next_batch = preempting(BatchScheduler.next_batch)


if FOLDER:
    inject()
