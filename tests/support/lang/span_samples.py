"""A program with forks and samples whose run becomes spans, and call segments with given times."""

from __future__ import annotations

from types import SimpleNamespace

import plait
from plait import assistant, gen, select, user
from plait.runtime.call_reports import Usage


@plait.function
def program(s, text="Q"):
    s += user(text) + assistant(gen("first"))
    forks = s.fork(2)
    forks += user("more") + assistant(gen("tip"))
    inner = forks[1].fork(1)
    inner += "deep" + gen("deep")
    inner.join()
    forks.join()
    s += user("?") + assistant(select("kind", ["yes", "no"]))
    s += gen("two", n=2)


def call_segment(branch_id, began_s, ended_s, **usage):
    result = SimpleNamespace(usage=Usage(**usage))
    call = SimpleNamespace(result=lambda: result)
    fixed = {"name": "x", "failure": lambda: None, "text": lambda: ""}
    return SimpleNamespace(branch_id=branch_id, began_s=began_s, ended_s=ended_s, call=call, **fixed)
