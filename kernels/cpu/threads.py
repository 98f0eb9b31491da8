"""How the threads of one step share its phases: each takes the next items of a phase, then waits for the others'.

A parallel region costs some microseconds to enter; a model's step has hundreds of phases. So it is entered once.
Whoever comes takes what is left, so a thread that is late, or never comes, costs time only.

Knows: counters in memory. Must not know: what the items are.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.cpu import llvm as v

COUNTER_STRIDE = 16  # int64 from one counter to the next: each has a cache line, and the one beside it, to itself
SPINS_BEFORE_YIELD = 4000  # looks at a counter before the processor is offered to others


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(context: Any, address: Any, count: Any) -> Any:
    """Adds to the int64 at an address; returns what was there."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.atomic_rmw("add", v.pointer_at(b, values[0], v.I64), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(context: Any, address: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.load_atomic(v.pointer_at(b, values[0], v.I64), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def spin_pause(context: Any) -> Any:
    """The x86 hint that this is a waiting loop."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        v.call_intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def yield_thread(context: Any) -> Any:
    """sched_yield of the C library, which every process has."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(v.I32, []), "sched_yield")
        b.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit  # type: ignore[untyped-decorator]
def claim_work(counters: int, phase: int, count: int) -> Any:
    """The first of `count` items that are the caller's now; at or beyond the phase's number of items: none."""
    return atomic_add(counters + 16 * COUNTER_STRIDE * phase, count)


@numba.njit  # type: ignore[untyped-decorator]
def claim_local_work(counters: int, phase: int, count: int, items: int, thread_id: int, threads: int) -> Any:
    """The first of at most `count` items that are thread `thread_id`'s now, and the one behind the last: of its own share of
    the phase's items while there are some, then of the others'. None are left: the first is `items`.

    A share lies in one piece, since two threads that read on in turns from one place get little more out of memory
    than one. A phase's items are claimed with this or with `claim_work`, not with both.
    """
    shares = min(threads, COUNTER_STRIDE)
    for i in range(shares):
        share = (thread_id + i) % shares
        begin, end = items * share // shares, items * (share + 1) // shares
        first = begin + atomic_add(counters + 8 * (2 * COUNTER_STRIDE * phase + share), count)
        if first < end:
            return first, min(end, first + count)
    return items, items


@numba.njit  # type: ignore[untyped-decorator]
def mark_done(counters: int, phase: int, count: int) -> None:
    """Says that `count` items are done."""
    atomic_add(counters + 16 * COUNTER_STRIDE * phase + 8 * COUNTER_STRIDE, count)


@numba.njit  # type: ignore[untyped-decorator]
def barrier_wait(counters: int, phase: int, items: int) -> None:
    """Until all `items` are done."""
    spins = 0
    while atomic_load(counters + 16 * COUNTER_STRIDE * phase + 8 * COUNTER_STRIDE) < items:
        spin_pause()
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_thread()
