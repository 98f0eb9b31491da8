"""Work sharing between the threads of one step: atomic counters in memory, one pair for each phase.

Entering a parallel region costs microseconds and a step has hundreds of phases, so a step enters one region only. A
phase is a number of independent items, and every phase runs the same loop on each thread (`shared_items`):

    claim the next items until there are none left; compute them; mark them done; wait until all items are done

A thread that is late, or never starts, costs time but loses no item.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from plait.kernels.cpu.parallel.atomics import add_and_wake, atomic_add, wait_until_at_least

COUNTER_STRIDE = 16  # int64 from one counter to the next: two cache lines, so that two counters never share a pair


class ThreadContext(NamedTuple):
    """A thread's part in a step."""

    thread_id: int
    num_threads: int
    counters: int  # address of int64 [phases, 2 * COUNTER_STRIDE], shared by all threads
    scratch: int  # address of this thread's AMX scratch (`amx`); 0: without AMX


def items_per_claim(items: int, ctx: ThreadContext) -> int:
    """Items that a thread claims at once: a quarter of its fair share."""
    return max(1, items // (4 * ctx.num_threads))


def claim_work(counters: int, phase: int, count: int) -> Any:
    """Claims `count` items of a phase; returns the first. At or beyond the phase's number of items: none are left."""
    return atomic_add(counters + 16 * COUNTER_STRIDE * phase, count)


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


def mark_done(counters: int, phase: int, count: int) -> None:
    """Adds `count` to the phase's finished items."""
    add_and_wake(counters + 16 * COUNTER_STRIDE * phase + 8 * COUNTER_STRIDE, count)


def barrier_wait(counters: int, phase: int, items: int) -> None:
    """Waits until all `items` of the phase are done."""
    wait_until_at_least(counters + 16 * COUNTER_STRIDE * phase + 8 * COUNTER_STRIDE, items)


def shared_items(ctx: ThreadContext, phase: int, items: int, count: int) -> Iterator[Any]:
    """The items of a phase that this thread claims, `count` at once; ends when the phase is done."""
    while True:
        first = claim_work(ctx.counters, phase, count)
        if first >= items:
            break
        last = min(items, first + count)
        for item in range(first, last):  # noqa: UP028, compiled code knows no `yield from`
            yield item
        mark_done(ctx.counters, phase, last - first)
    barrier_wait(ctx.counters, phase, items)


def shared_ranges(ctx: ThreadContext, phase: int, items: int) -> Iterator[tuple[Any, Any]]:
    """As `shared_items`, each claim as its first item and the one after its last (`claim_local_work`)."""
    count = items_per_claim(items, ctx)
    while True:
        first, last = claim_local_work(ctx.counters, phase, count, items, ctx.thread_id, ctx.num_threads)
        if first >= items:
            break
        yield first, last
        mark_done(ctx.counters, phase, last - first)
    barrier_wait(ctx.counters, phase, items)
