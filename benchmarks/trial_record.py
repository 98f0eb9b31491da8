"""The results of numbered trials, in a file that is rewritten after each trial, so that a killed run can be resumed.

    {"code": "3f…", "parts": {"bf16": {"done": [[0, 152]], "seconds": 310.2, "kinds": {"whole, cold": 31, …},
                                       "retractions": 170, "failing": [{"trial": 17, "kind": …, "how": …}]}}}

Every finished trial counts once. All trials of a file ran with the same code.
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
    """`path` None: kept in memory only. Raises ValueError if the file is from other code or settings."""

    def __init__(self, path: Path | None, code: str) -> None:
        self._path = path
        self._all: dict[str, Any] = {"code": code, "parts": {}}
        if path is not None and path.exists():
            self._all = json.loads(path.read_text())
            if self._all["code"] != code:
                raise ValueError(
                    f"{path} is of other code or settings: its trials cannot be counted together with new ones"
                )

    def part(self, name: str) -> Part:
        """The counts of one part, created on first use."""
        new = {"done": [], "seconds": 0.0, "kinds": {}, "retractions": 0, "failing": []}
        part: Part = self._all["parts"].setdefault(name, new)
        return part

    def num_done(self, name: str) -> int:
        """Finished trials of a part."""
        return sum(end - first for first, end in self.part(name)["done"])

    def remaining(self, name: str, first: int, count: int) -> Iterator[int]:
        """Yields those of trials [first, first + count) that are not finished at the time of each request."""
        for number in range(first, first + count):
            if not any(start <= number < end for start, end in self.part(name)["done"]):
                yield number

    def add(self, name: str, number: int, kind: str, how: str, seconds: float, retractions: int) -> None:
        """Counts a finished trial and writes the file. `how`: how it failed, "" if it did not."""
        part = self.part(name)
        assert number in self.remaining(name, number, 1), "a trial counts once"
        part["done"] = _merged([*part["done"], [number, number + 1]])
        part["seconds"] = round(part["seconds"] + seconds, 3)
        part["kinds"][kind] = part["kinds"].get(kind, 0) + 1
        part["retractions"] += retractions
        if how:
            part["failing"].append({"trial": number, "kind": kind, "how": how})
        if self._path is not None:
            new_file = self._path.with_name(self._path.name + ".new")
            new_file.write_text(json.dumps(self._all, indent=1))
            os.replace(new_file, self._path)

    def summary(self, name: str) -> str:
        """One line about a part, with the numbers of the failing trials."""
        part = self.part(name)
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(part["kinds"].items()))
        numbers = ", ".join(str(failure["trial"]) for failure in part["failing"])
        return (
            f"{len(part['failing'])} of {self.num_done(name)} trials differ{numbers and f': {numbers}'} "
            f"({part['seconds']:.0f} s; {kinds}; {part['retractions']} retractions)"
        )


def _merged(ranges: list[list[int]]) -> list[list[int]]:
    """Sorts the ranges and joins adjacent ones."""
    merged: list[list[int]] = []
    for first, end in sorted(ranges):
        if merged and merged[-1][1] == first:
            merged[-1][1] = end
        else:
            merged.append([first, end])
    return merged


def code_stamp(folders: list[Path], *settings: object) -> str:
    """A hash of every Python file in the folders and of the settings that affect trials."""
    digest = hashlib.sha256(repr(settings).encode())
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
