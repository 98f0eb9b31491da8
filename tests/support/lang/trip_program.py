"""A program with every kind of call, and a tool: what the tests of `plait.testing` run."""

from __future__ import annotations

import plait
from plait import assistant, gen, select, system, user


def add(a: int, b: int = 0) -> int:
    """Adds."""
    return a + b


@plait.function
def trip(s, country):
    s += system("You help.") + user(f"The capital of {country}?") + assistant(gen("capital", stop="\n", max_tokens=8))
    s += user("Known for?") + assistant(select("kind", ["food", "art"]))
    forks = s.fork(2)
    forks += lambda i: user(f"Tip {i + 1}.") + assistant(gen("tip", max_tokens=8))
    forks.join()
    return s["capital"]
