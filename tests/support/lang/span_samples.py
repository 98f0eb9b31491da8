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
    result = SimpleNamespace(usage=Usage(**usage), logprobs=None, token_ids=[], extra_meta=None)
    call = SimpleNamespace(result=lambda: result, done=lambda: True, usage=result.usage, failure=None, num_tokens=0)
    fixed = {"name": "x", "text": lambda: "", "siblings": ()}
    return SimpleNamespace(branch_id=branch_id, began_s=began_s, ended_s=ended_s, call=call, **fixed)


def run_of(call_segments, branch_parents):
    """A run, of which a trace is made, with these calls."""
    fixed = {"program": "p", "started_s": 0.0, "error": None, "ended_branches": {}, "progress": lambda: "done"}
    return SimpleNamespace(branch_parents=branch_parents, call_segments=lambda: call_segments, **fixed)
