"""The files of tests that take longer than a second, the longest first: `tests/slow_files.txt`.

`make test` begins with them, so that no worker is left with one when the others are done; `make quick` leaves them out.
After files were added or became slower, a run of all tests on an idle machine makes the list anew:

    .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder --junitxml=junit.xml
    .venv/bin/python tests/support/slow_files.py junit.xml
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
LIST = TESTS / "slow_files.txt"
LEAST_S = 1.0


def slow_files() -> list[Path]:
    """The files, the longest first."""
    return [TESTS / line.split()[1] for line in LIST.read_text().splitlines()]


def left_out_of_quick() -> set[Path]:
    """The files that `make quick` leaves out. Where all files of a folder are slow, it runs the shortest of them."""
    slow = slow_files()
    kept = {path.parent: path for path in slow if set(path.parent.glob("test_*.py")) <= set(slow)}  # the last of each
    return {*slow} - {*kept.values()}


def seconds_of(report: Path) -> Counter[str]:
    """The seconds of each file, relative to TESTS, in a JUnit report of pytest."""
    seconds = Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        names = case.get("classname", "").split(".")[1:]
        while names and not (TESTS.joinpath(*names).with_suffix(".py")).exists():
            names.pop()  # a class within a file
        if names:
            seconds["/".join(names) + ".py"] += float(case.get("time", 0))
    return seconds


def main() -> None:
    longest = seconds_of(Path(sys.argv[1])).most_common()
    LIST.write_text("".join(f"{spent:.1f} {name}\n" for name, spent in longest if spent >= LEAST_S))


if __name__ == "__main__":
    main()
