"""Ten times the load that a server can serve, with a limit on the time that a request waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from faults.figures import Figure, Scale, at_most
from faults.served import serve
from serving_overload import measure, take_priority

MAX_QUEUE_TIME_S = 1.0


def inflict(scale: Scale) -> Iterator[Figure]:
    """The client runs on the last core and the server on the others, so that the client costs it nothing."""
    cores, priority = sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    seconds = scale.count(20, 5)
    try:
        os.sched_setaffinity(0, cores[:-1] or cores)  # inherited by the server and its runtime
        with serve("--drain-timeout=0", f"--max-queue-time={MAX_QUEUE_TIME_S}") as server:
            os.sched_setaffinity(0, cores[-1:])
            take_priority()
            result = asyncio.run(measure(server.port, seconds, 10.0, 1))
            is_served = server.complete().status_code == 200
    finally:
        os.sched_setaffinity(0, cores)
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    fault = f"ten times the peak load for {seconds} s, --max-queue-time {MAX_QUEUE_TIME_S:g}"
    note = f"at the peak {result.peak_p99_s:.2f} s, at 0.9 of it {result.p99_below_peak_s:.2f} s"
    limit_s = MAX_QUEUE_TIME_S + result.idle_s
    yield at_most(f"{fault}: time to first token, p99", result.p99_s, round(limit_s, 3), "s", note, is_timed=True)
    low, high = result.refusal_min_s, result.refusal_p99_s
    kept = low >= MAX_QUEUE_TIME_S and high <= MAX_QUEUE_TIME_S + 0.1
    promise = f"{MAX_QUEUE_TIME_S:g} to {MAX_QUEUE_TIME_S + 0.1:g} s"
    yield Figure("the same: a refusal (least, p99)", promise, f"{low:.3f}, {high:.3f} s", kept, is_timed=True)
    goodput = 100 * result.goodput
    yield Figure("the same: goodput", ">= 90 % of the peak", f"{goodput:.0f} %", goodput >= 90, is_timed=True)
    yield at_most("the same: normal after its end", result.recovery_s, 5, "s", is_timed=True)
    yield at_most("the same: answers other than 200, 429, 503", result.num_errors + (not is_served), 0, "")
