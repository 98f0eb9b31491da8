"""Atomic operations on int64 counters in memory, and waiting for a change of one: spinning, then asleep (futex).

The system call `futex` compares the number again before it sleeps, so no change is missed.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler.intrinsics import Int, intrinsic

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
MACHINE = platform.machine()
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(MACHINE, 0)  # of Linux
HAS_FUTEX = sys.platform == "linux" and SYS_FUTEX > 0
ALL_THREADS = 0x7FFFFFFF
SLEEPERS = 8  # bytes from a number that threads wait for to the number of those that sleep
SPINS_BEFORE_SLEEP = 2000  # reads of a number before a waiting thread sleeps: about 0.1 ms


@intrinsic
def atomic_add(b: Any, address: Int, count: Int) -> Int:
    """Adds `count` to the int64 at an address; returns the value before."""
    return b.atomic_rmw("add", v.pointer_at(b, address, v.I64), count, "seq_cst")


@intrinsic
def atomic_load(b: Any, address: Int) -> Int:
    """Returns the int64 at an address."""
    return b.load_atomic(v.pointer_at(b, address, v.I64), "seq_cst", 8)


@intrinsic
def spin_pause(b: Any) -> None:
    """The PAUSE instruction of x86, for waiting loops; nothing on other processors."""
    if MACHINE in ("x86_64", "AMD64"):
        v.call_intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType(), [])


@intrinsic
def yield_thread(b: Any) -> None:
    """Calls `sched_yield` of the C library."""
    function = v.external_function(b, "sched_yield", ir.FunctionType(v.I32, []))
    b.call(function, [])


@intrinsic
def atomic_store(b: Any, address: Int, value: Int) -> None:
    """Stores an int64 at an address."""
    b.store_atomic(value, v.pointer_at(b, address, v.I64), "seq_cst", 8)


@intrinsic
def _futex(b: Any, address: Int, operation: Int, value: Int) -> None:
    """The system call `futex` without a time limit, on the lower 32 bits of the int64 at an address."""
    kind = ir.FunctionType(v.I64, [v.I64], var_arg=True)
    function = v.external_function(b, "syscall", kind)
    b.call(function, [v.I64(SYS_FUTEX), address, operation, value, v.I64(0), v.I64(0), v.I64(0)])


def add_and_wake(address: int, count: int) -> None:
    """Adds `count` to the int64 at `address`, and wakes the threads that sleep in `wait_until_at_least` for it."""
    atomic_add(address, count)
    if HAS_FUTEX and atomic_load(address + SLEEPERS) > 0:
        _futex(address, FUTEX_WAKE_PRIVATE, ALL_THREADS)


def wait_until_at_least(address: int, minimum: int) -> Any:
    """Waits until the int64 at `address`, which only `add_and_wake` changes meanwhile, is at least `minimum`.

    Returns it. A thread that waits long sleeps: the thread that it waits for has probably lost its processor, and may
    go on on this one. `sched_yield` instead would give the processor to any other process for milliseconds.
    """
    spins = 0
    while True:
        number = atomic_load(address)
        if number >= minimum:
            return number
        if spins < SPINS_BEFORE_SLEEP:
            spin_pause()
            spins += 1
        elif HAS_FUTEX:
            atomic_add(address + SLEEPERS, 1)
            _futex(address, FUTEX_WAIT_PRIVATE, number & 0xFFFFFFFF)  # returns at once if the number has changed
            atomic_add(address + SLEEPERS, -1)
        else:
            yield_thread()
