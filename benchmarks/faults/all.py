"""Inflicts faults on servers as users start them, and compares what happens with what docs/reliability.md promises.

    python benchmarks/faults/all.py [--only programs,frames] [--short] [--frames 100000] [--soak-minutes 0]

Prints a row for each fault: the promise, the figure measured, and whether it was kept. Rows marked "timed" depend on
how busy the machine is. The exit code is 1 if a promise was broken. With --soak-minutes only the soak runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
SUPPORT = [ROOT / "tests" / "support" / name for name in ("engine", "constrained", "models")]
sys.path[:0] = [str(ROOT / "benchmarks"), *map(str, SUPPORT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common.signals import unwind_on_signal  # noqa: E402
from faults.figures import Figure, Scale  # noqa: E402

# name: the most seconds it may take. A module of groups/ with a function `inflict(scale)`.
GROUPS = {
    "programs": 150,
    "connections": 150,
    "slow_clients": 150,
    "browsers": 60,
    "frames": 200,
    "constraints": 150,
    "hostile_input": 150,
    "processes": 200,
    "resources": 150,
    "model_files": 150,
    "tenants": 240,
    "logs": 100,
    "overload": 150,
    "event_loop": 240,
    "scheduler": 150,
}


TOTAL_S = 20 * 60


class GroupTimeout(Exception):
    """A group took longer than it may."""


def figures_of(group: str, scale: Scale, end: float) -> Iterator[Figure]:
    """The figures of a group; an error or the time limit (the suite's is `end`) is a broken promise as well."""
    limit_s = max(1, min(GROUPS[group], int(end - time.monotonic())))

    def stop(number: int, frame: FrameType | None) -> None:
        raise GroupTimeout(f"the group took longer than {limit_s} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        yield from importlib.import_module(f"faults.groups.{group}").inflict(scale)
    except Exception as error:
        yield Figure("the group ran to its end", "no error", f"{type(error).__name__}: {error}"[:300], False)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help=f"groups, of {', '.join(GROUPS)}")
    parser.add_argument("--short", action="store_true", help="each fault once or a few times")
    parser.add_argument("--frames", type=int, default=100_000, help="mutated frames")
    parser.add_argument("--scheduler-steps", type=int, default=20_000, help="random steps of the scheduler's model")
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="run only the soak, for this long")
    options = parser.parse_args()
    unwind_on_signal()
    names = options.only.split(",") if options.only else list(GROUPS)
    if unknown := set(names) - set(GROUPS):
        parser.error(f"unknown groups: {', '.join(sorted(unknown))}")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| group | fault | promise | measured | |\n|---|---|---|---|---|", flush=True)
    scale, start, broken = Scale(options.short, options.frames, options.scheduler_steps), time.monotonic(), 0
    if options.soak_minutes:
        from faults.soak import soak

        groups = iter([("soak", soak(options.soak_minutes))])
    else:
        groups = iter([(name, figures_of(name, scale, start + TOTAL_S)) for name in names])
    for group, figures in groups:
        for figure in figures:
            print(figure.row(group), flush=True)
            broken += not figure.is_kept
    print(f"\n{broken} promises broken; {time.monotonic() - start:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
