"""Inflicts faults on servers as users start them, and compares what happens with what docs/reliability.md promises.

    python benchmarks/faults/all.py [--only resources,tenants] [--short] [--soak-minutes 0]

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

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common.signals import unwind_on_signal
from faults.figures import Figure, Scale

# name: the most seconds it may take. A module of groups/ with a function `inflict(scale)`.
GROUPS = {"resources": 150, "tenants": 240, "overload": 150, "event_loop": 240}


class GroupTimeout(Exception):
    """A group took longer than it may."""


def figures_of(group: str, scale: Scale) -> Iterator[Figure]:
    """The figures of a group; an error or the time limit is a broken promise as well."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise GroupTimeout(f"the group took longer than {GROUPS[group]} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(GROUPS[group])
    try:
        yield from importlib.import_module(f"faults.groups.{group}").inflict(scale)
    except Exception as error:
        yield Figure("the group ran to its end", "no error", f"{type(error).__name__}: {error}"[:300], False)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, of %(default)s")
    parser.add_argument("--short", action="store_true", help="each fault once or a few times")
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="run only the soak, for this long")
    options = parser.parse_args()
    unwind_on_signal()
    names = options.only.split(",")
    if unknown := set(names) - set(GROUPS):
        parser.error(f"unknown groups: {', '.join(sorted(unknown))}")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| group | fault | promise | measured | |\n|---|---|---|---|---|", flush=True)
    start, broken = time.monotonic(), 0
    if options.soak_minutes:
        from faults.soak import soak

        groups = iter([("soak", soak(options.soak_minutes))])
    else:
        groups = ((name, figures_of(name, Scale(options.short))) for name in names)
    for group, figures in groups:
        for figure in figures:
            print(figure.row(group), flush=True)
            broken += not figure.is_kept
    print(f"\n{broken} promises broken; {time.monotonic() - start:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
