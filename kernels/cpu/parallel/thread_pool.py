"""The threads of a step: they stay between steps, and a step starts them by changing a number that they wait for.

A step does not wait for threads that have not begun when its work is done: a thread that is slow to wake up costs its
share of the work and no more. Waiting threads spin briefly and then sleep.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Int, intrinsic
from plait.kernels.cpu.compiler.library import KernelLibrary
from plait.kernels.cpu.kernel_args import aligned_zeros
from plait.kernels.cpu.parallel.atomics import (
    add_and_wake,
    atomic_add,
    atomic_load,
    atomic_store,
    wait_until_at_least,
)

SERIAL_PART = -1  # the thread id with which a kernel runs once before its threads start
THREAD_NAME = "cpu-kernel"
SHORT_INTERVAL_S = 0.002
CLOSED = 1 << 40  # added to GATE when the step's work is done

# Byte offsets within the control block, which all threads share. Each is followed by room for its SLEEPERS.
STEP = 0  # steps started so far: what the threads wait for
GATE = 128  # threads that have begun with this step, plus CLOSED when no more may begin
FINISHED = 256  # threads that have ended their part of this step: what the step waits for
KERNEL, THREADS, ARGS = 384, 392, 400  # what to run
CONTROL_BYTES = 512


@intrinsic
def _call_kernel(b: Any, function: Int, thread_id: Int, threads: Int, args: Int) -> None:
    """Calls the machine code at an address."""
    kind = ir.FunctionType(ir.VoidType(), [v.I64] * 3)
    b.call(b.inttoptr(function, kind.as_pointer()), [thread_id, threads, args])


def run_step(function: int, address: int, threads: int, control: int) -> None:
    """Runs the kernel at an address: first its serial part, then a part on this thread and on those that wake."""
    _call_kernel(function, SERIAL_PART, threads, address)
    if threads > 1:
        atomic_store(control + KERNEL, function)
        atomic_store(control + THREADS, threads)
        atomic_store(control + ARGS, address)
        atomic_store(control + FINISHED, 0)
        atomic_store(control + GATE, 0)
        add_and_wake(control + STEP, 1)
    _call_kernel(function, 0, threads, address)
    if threads > 1:
        begun = atomic_add(control + GATE, CLOSED)
        wait_until_at_least(control + FINISHED, begun)


def serve_steps(control: int, thread_id: int) -> None:
    """Runs a thread's part of all steps to come; never returns."""
    step = 0
    while True:
        step = wait_until_at_least(control + STEP, step + 1)
        if atomic_load(control + THREADS) > thread_id and atomic_add(control + GATE, 1) < CLOSED:
            kernel, args = atomic_load(control + KERNEL), atomic_load(control + ARGS)
            _call_kernel(kernel, thread_id, atomic_load(control + THREADS), args)
            add_and_wake(control + FINISHED, 1)


LIBRARY = KernelLibrary("threads", run_step, serve_steps)


@cache
def _compiled_step(leaves_lock: bool) -> Any:
    """Returns `run_step` as compiled code, which runs without Python's global lock or keeps it."""
    kind = ctypes.CFUNCTYPE if leaves_lock else ctypes.PYFUNCTYPE
    return kind(None, *[ctypes.c_int64] * 4)(LIBRARY.load()["run_step"])


@cache
def compiled_worker() -> Any:
    """Returns `serve_steps` as compiled code that runs without Python's global lock."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(LIBRARY.load()["serve_steps"])


def launch(function: int, args: np.ndarray[Any, Any], threads: int, control: int) -> None:
    """Runs the kernel at an address on `args` with up to `threads` threads, this one among them.

    A step leaves Python's global lock to threads that read adapters and build grammars, if the switch interval is short
    as in a runtime's process. With Python's 5 ms it would wait that long after each kernel beside a busy thread.
    """
    _compiled_step(sys.getswitchinterval() < SHORT_INTERVAL_S)(function, args.ctypes.data, threads, control)


class ThreadPool:
    """The threads of this process that take part in steps, besides the one that calls a kernel. lock: of a step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        memory = aligned_zeros((CONTROL_BYTES,), np.uint8)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # threads read it until the process has ended
        self.control = int(memory.ctypes.data)
        self.num_threads = 1

    def grow(self, threads: int) -> None:
        """Starts what is missing to `threads` threads, the caller included."""
        while self.num_threads < threads:
            arguments = (self.control, self.num_threads)
            threading.Thread(target=compiled_worker(), args=arguments, name=THREAD_NAME, daemon=True).start()
            self.num_threads += 1


_pool = ThreadPool()


def _new_pool() -> None:
    """A forked process has only the thread that forked."""
    global _pool
    _pool = ThreadPool()


os.register_at_fork(after_in_child=_new_pool)


class ThreadKernel:
    """A function (thread_id, threads, address of the arguments) that several threads run at once.

    It is one of the kernels of a library, or has one for itself.
    """

    def __init__(self, function: Callable[[int, int, int], None], library: KernelLibrary | None = None) -> None:
        self.function = function
        self._library = library or KernelLibrary(function.__name__, function)

    @property
    def address(self) -> int:
        """The address of the machine code, which changes when optimized code replaces other code."""
        return self._library.load()[self.function.__name__]

    def __call__(self, args: np.ndarray[Any, Any], threads: int) -> None:
        """Runs the kernel on `args`, int64 [entries, 3] (`kernel_args`), with up to `threads` threads."""
        with _pool.lock:
            if threads > _pool.num_threads:
                _pool.grow(threads)
            launch(self.address, args, threads, _pool.control)
