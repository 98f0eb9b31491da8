"""Work sharing between the threads of one step: atomic counters in memory, one pair for each phase.

Entering a parallel region costs microseconds and a step has hundreds of phases, so a step enters one region only. A
phase is a number of independent items, and every phase runs the same loop on each thread:

    claim the next items until there are none left; compute them; mark them done; wait until all items are done

A thread that is late, or never starts, costs time but loses no item. The loop is written out in every phase because
numba compiles no closures here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v
from plait.kernels.cpu.compile_cache import SOURCE_HASH, cached_cfunc, cached_njit
from plait.kernels.cpu.jit import inner_njit
from plait.kernels.cpu.vector_ops import address_of

SERIAL_PART = -1  # the thread id with which a kernel runs once before its threads start
COUNTER_STRIDE = 16  # int64 from one counter to the next: two cache lines, so that two counters never share a pair
SPINS_BEFORE_YIELD = 4000  # reads of a counter before a waiting thread offers its processor to others


class ThreadContext(NamedTuple):
    """A thread's part in a step."""

    thread_id: int
    num_threads: int
    counters: int  # address of int64 [phases, 2 * COUNTER_STRIDE], shared by all threads
    scratch: int  # address of this thread's AMX scratch (`amx`); 0: without AMX


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(context: Any, address: Any, count: Any) -> Any:
    """Adds `count` to the int64 at an address; returns the value before."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.atomic_rmw("add", v.pointer_at(b, values[0], v.I64), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(context: Any, address: Any) -> Any:
    """Returns the int64 at an address."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.load_atomic(v.pointer_at(b, values[0], v.I64), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def spin_pause(context: Any) -> Any:
    """The x86 PAUSE instruction, for waiting loops."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        v.call_intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def yield_thread(context: Any) -> Any:
    """Calls `sched_yield` of the C library."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(v.I32, []), "sched_yield")
        b.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call_kernel(context: Any, function: Any, thread_id: Any, threads: Any, args: Any) -> Any:
    """Calls the machine code at an address."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [v.I64] * 3)
        b.call(b.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _compiled_launcher(source_hash: int) -> Any:
    @cached_njit(parallel=True)
    def launch(function: int, args: Any, threads: int) -> None:
        """Runs the kernel at an address: first its serial part, then each thread's part in a parallel region."""
        _ = source_hash
        address = address_of(args)
        _call_kernel(function, np.int64(SERIAL_PART), threads, address)
        for thread_id in numba.prange(threads):
            _call_kernel(function, np.int64(thread_id), threads, address)

    return launch


launch = _compiled_launcher(SOURCE_HASH)


class ThreadKernel:
    """A function (thread_id, threads, address of the arguments) that several threads run at once.

    It is compiled by its first call, or found in the cache. numba compiles the body of a parallel loop four times; here
    that body is one call of an address, so the function itself is compiled once.
    """

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """The address of the machine code."""
        self._compiled = cached_cfunc(types.void(types.int64, types.int64, types.int64), self.function)
        return int(self._compiled.address)

    def __call__(self, args: Any, threads: int) -> None:
        """Runs the kernel on `args`, int64 [entries, 3] (`kernel_args`), with `threads` threads."""
        launch(self.address, args, threads)


@inner_njit
def items_per_claim(items: int, ctx: ThreadContext) -> int:
    """Items that a thread claims at once: a quarter of its fair share."""
    return max(1, items // (4 * ctx.num_threads))


@inner_njit
def claim_work(counters: int, phase: int, count: int) -> Any:
    """Claims `count` items of a phase; returns the first. At or beyond the phase's number of items: none are left."""
    return atomic_add(counters + 16 * COUNTER_STRIDE * phase, count)


@numba.njit  # type: ignore[untyped-decorator]
def claim_local_work(counters: int, phase: int, count: int, items: int, thread_id: int, threads: int) -> Any:
    """Claims up to `count` items, first from the thread's own share of the phase, then from the other threads' shares.

    Returns the first item and the one after the last; (items, items) when none are left. A share is a contiguous
    range, because two threads that alternate on one range of weights get little more memory bandwidth than one. A
    phase uses either this function or `claim_work`, not both.
    """
    shares = min(threads, COUNTER_STRIDE)
    for i in range(shares):
        share = (thread_id + i) % shares
        begin, end = items * share // shares, items * (share + 1) // shares
        first = begin + atomic_add(counters + 8 * (2 * COUNTER_STRIDE * phase + share), count)
        if first < end:
            return first, min(end, first + count)
    return items, items


@inner_njit
def mark_done(counters: int, phase: int, count: int) -> None:
    """Adds `count` to the phase's finished items."""
    atomic_add(counters + 16 * COUNTER_STRIDE * phase + 8 * COUNTER_STRIDE, count)


@inner_njit
def barrier_wait(counters: int, phase: int, items: int) -> None:
    """Waits until all `items` of the phase are done."""
    spins = 0
    while atomic_load(counters + 16 * COUNTER_STRIDE * phase + 8 * COUNTER_STRIDE) < items:
        spin_pause()
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_thread()
