"""What a fault did: its promise, the figure measured, and whether the promise was kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

POLL_S = 0.005


@dataclass(frozen=True)
class Figure:
    """One row of the table. is_timed: the figure depends on how busy the machine is."""

    fault: str
    promise: str
    measured: str
    is_kept: bool
    is_timed: bool = False

    def row(self, group: str) -> str:
        outcome = ("kept" if self.is_kept else "**broken**") + (" (timed)" if self.is_timed else "")
        return f"| {group} | {self.fault} | {self.promise} | {self.measured} | {outcome} |"


@dataclass(frozen=True)
class Scale:
    """How long a run is. is_short: each fault once or a few times, within seconds."""

    is_short: bool

    def count(self, full: int, short: int) -> int:
        return short if self.is_short else full


def at_most(fault: str, value: float, limit: float, unit: str, note: str = "", *, is_timed: bool = False) -> Figure:
    """A figure with an upper limit."""
    number = f"{value:,.0f}" if math.isfinite(value) and (value >= 1000 or value == int(value)) else f"{value:.3g}"
    measured = f"{number} {unit}".strip() + (f"; {note}" if note else "")
    return Figure(fault, f"<= {limit:g} {unit}".strip(), measured, value <= limit, is_timed)


def none_of(fault: str, failures: list[str], count: int, what: str) -> Figure:
    """A figure of cases, none of which may fail."""
    named = f": {'; '.join(failures[:3])}" if failures else ""
    return Figure(fault, f"0 {what}", f"{len(failures)} of {count:,}{named}"[:300], not failures and count > 0)


def wait_until(condition: Callable[[], object], timeout_s: float) -> float:
    """Returns the seconds until `condition()` holds, or infinity after `timeout_s`."""
    start = time.perf_counter()
    while not condition():
        if time.perf_counter() - start > timeout_s:
            return float("inf")
        time.sleep(POLL_S)
    return time.perf_counter() - start
