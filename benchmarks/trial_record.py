"""What numbered trials gave, in a file that is replaced after each of them: a run that was killed goes on where it was.

    {"code": "3f…", "parts": {"bf16": {"done": [[0, 152]], "seconds": 310.2, "kinds": {"whole, cold": 31, …},
                                       "retractions": 170, "failing": [{"trial": 17, "kind": …, "how": …}]}}}

Counts are of trials that were brought to an end, each of them once, and all of one code. Knows: numbers, files. Must
not know: what a trial does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Part = dict[str, Any]


class Record:
    """`path` None: kept in memory alone. ValueError for a file of other code, which cannot be added to."""

    def __init__(self, path: Path | None, code: str) -> None:
        self._path = path
        self._all: dict[str, Any] = {"code": code, "parts": {}}
        if path is not None and path.exists():
            self._all = json.loads(path.read_text())
            if self._all["code"] != code:
                raise ValueError(
                    f"{path} is of other code or settings: its trials and these cannot be counted together"
                )

    def part(self, name: str) -> Part:
        """What is counted under one name."""
        new = {"done": [], "seconds": 0.0, "kinds": {}, "retractions": 0, "failing": []}
        part: Part = self._all["parts"].setdefault(name, new)
        return part

    def num_done(self, name: str) -> int:
        return sum(end - first for first, end in self.part(name)["done"])

    def left(self, name: str, first: int, count: int) -> Iterator[int]:
        """Those of trials [first, first + count) that are not done yet, as it is when each is asked for."""
        for number in range(first, first + count):
            if not any(begin <= number < end for begin, end in self.part(name)["done"]):
                yield number

    def add(self, name: str, number: int, kind: str, how: str, seconds: float, retractions: int) -> None:
        """Counts a trial that is over, and writes the file. `how` it failed: "" if it did not."""
        part = self.part(name)
        assert number in self.left(name, number, 1), "a trial counts once"
        part["done"] = _merged([*part["done"], [number, number + 1]])
        part["seconds"] = round(part["seconds"] + seconds, 3)
        part["kinds"][kind] = part["kinds"].get(kind, 0) + 1
        part["retractions"] += retractions
        if how:
            part["failing"].append({"trial": number, "kind": kind, "how": how})
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".new")
            beside.write_text(json.dumps(self._all, indent=1))
            os.replace(beside, self._path)

    def summary(self, name: str) -> str:
        part = self.part(name)
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(part["kinds"].items()))
        numbers = ", ".join(str(each["trial"]) for each in part["failing"])
        return (
            f"{len(part['failing'])} of {self.num_done(name)} trials differ{numbers and f': {numbers}'} "
            f"({part['seconds']:.0f} s; {kinds}; {part['retractions']} retractions)"
        )


def _merged(ranges: list[list[int]]) -> list[list[int]]:
    """Sorted, and those that touch as one."""
    found: list[list[int]] = []
    for first, end in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1][1] = end
        else:
            found.append([first, end])
    return found


def code_stamp(folders: list[Path], *settings: object) -> str:
    """A hash of every Python file in the folders, and of what else decides what a trial does."""
    digest = hashlib.sha256(repr(settings).encode())
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
