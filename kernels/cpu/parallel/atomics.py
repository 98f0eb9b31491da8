"""Atomic operations on int64 counters in memory, and waiting for a change of one: spinning, then asleep (futex).

The system call `futex` compares the number again before it sleeps, so no change is missed.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compiler import signatures as types
from plait.kernels.cpu.compiler.intrinsics import intrinsic

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
MACHINE = platform.machine()
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(MACHINE, 0)  # of Linux
HAS_FUTEX = sys.platform == "linux" and SYS_FUTEX > 0
ALL_THREADS = 0x7FFFFFFF
SLEEPERS = 8  # bytes from a number that threads wait for to the number of those that sleep
SPINS_BEFORE_SLEEP = 2000  # reads of a number before a waiting thread sleeps: about 0.1 ms


@intrinsic
def atomic_add(context: Any, address: Any, count: Any) -> Any:
    """Adds `count` to the int64 at an address; returns the value before."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.atomic_rmw("add", v.pointer_at(b, values[0], v.I64), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(context: Any, address: Any) -> Any:
    """Returns the int64 at an address."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.load_atomic(v.pointer_at(b, values[0], v.I64), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def spin_pause(context: Any) -> Any:
    """The PAUSE instruction of x86, for waiting loops; nothing on other processors."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        if MACHINE in ("x86_64", "AMD64"):
            v.call_intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_thread(context: Any) -> Any:
    """Calls `sched_yield` of the C library."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        function = v.external_function(b, "sched_yield", ir.FunctionType(v.I32, []))
        b.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def atomic_store(context: Any, address: Any, value: Any) -> Any:
    """Stores an int64 at an address."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        b.store_atomic(values[1], v.pointer_at(b, values[0], v.I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _futex(context: Any, address: Any, operation: Any, value: Any) -> Any:
    """The system call `futex` without a time limit, on the lower 32 bits of the int64 at an address."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(v.I64, [v.I64], var_arg=True)
        function = v.external_function(b, "syscall", kind)
        b.call(function, [v.I64(SYS_FUTEX), *values, v.I64(0), v.I64(0), v.I64(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


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
