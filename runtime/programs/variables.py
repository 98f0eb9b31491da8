"""Variables of a program's branches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

V = TypeVar("V")


def gather_variables(before: Collection[str], branches: Sequence[Mapping[str, V]]) -> dict[str, list[V]]:
    """Each name that is new in a branch -> the branches' values, in order. `before`: the names at the fork.

    >>> gather_variables({"a"}, [{"a": 2, "b": 3}, {"a": 1, "b": 4, "c": 5}])
    {'b': [3, 4], 'c': [5]}
    """
    gathered: dict[str, list[V]] = {}
    for branch in branches:
        for name, value in branch.items():
            if name not in before:
                gathered.setdefault(name, []).append(value)
    return gathered
