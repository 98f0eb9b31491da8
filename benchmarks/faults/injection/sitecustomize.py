"""Makes parts of plait fail at random in every process that has this folder in PYTHONPATH, for the soak.

Python imports a module of this name when it starts. PLAIT_FAULT_FOLDER names a folder: nothing fails before it contains
a file `active`, and every failure appends a byte to the file of its name there.
"""

from __future__ import annotations

import errno
import importlib.abc
import importlib.machinery
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
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


def fail_steps(module: ModuleType) -> None:
    runner = module.PackedCpuRunner
    runner.forward = raising("step", runner.forward)


def fail_samplers(module: ModuleType) -> None:
    module.Sampler.sample = raising("sampler", module.Sampler.sample)


def fail_masks(module: ModuleType) -> None:
    module.TokenMaskBuilder.fill = raising("mask", module.TokenMaskBuilder.fill)


def preempt(module: ModuleType) -> None:
    """A running request loses its pages, as when the pool is too small."""
    next_batch = module.BatchScheduler.next_batch

    @wraps(next_batch)
    def wrapped(self: Any) -> Any:
        if self.running and occurs("preemption"):
            self.retract(random.choice(list(self.running)))
        return next_batch(self)

    module.BatchScheduler.next_batch = wrapped


def fill_the_disk_of_the_log(module: ModuleType) -> None:
    class FailingOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: Any) -> int:
            if occurs("log"):
                raise OSError(errno.ENOSPC, "injected: log")
            return os.write(fd, data)

    module.os = FailingOs()  # type: ignore[attr-defined]


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "plait.runtime.executor.packed_cpu_runner": fail_steps,
    "plait.runtime.sampling.sampler": fail_samplers,
    "plait.runtime.scheduler.token_mask": fail_masks,
    "plait.runtime.scheduler.policy.batching": preempt,
    "plait.runtime.log_writer": fill_the_disk_of_the_log,
}


class PatchedLoader(importlib.abc.Loader):
    """Loads a module as `loader` does, and patches it."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of PATCHES where the other finders find them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                assert spec.loader is not None
                spec.loader = PatchedLoader(spec.loader, PATCHES[fullname])
                return spec
        return None


if FOLDER:
    sys.meta_path.insert(0, PatchingFinder())
