"""Helpers of the tests of `compile()`: programs, the requests that a run sent, comparison of body and graph."""

from __future__ import annotations

import plait
from plait import assistant, gen, select, system, user
from plait.runtime.messages import Append, Fork, Generate, Select

TOPICS = ["price", "quality"]


@plait.function
def review(s, text, k=2):
    s += system("You are terse.")
    s += user(f"A review: {text}\nWhat does it say?")
    s += assistant(gen("summary", max_tokens=40, stop="\n"))
    s += user("Is " + s["summary"] + " positive?")
    s += assistant(select("verdict", ["yes", "no"]))
    branches = s.fork(k)
    for branch, topic in zip(branches, TOPICS, strict=True):
        branch += user(f"And the {topic}?")
        branch += assistant(gen("detail", max_tokens=24))
    branches.join()
    s += user("Sum up: " + s["detail"][0] + "; " + s["detail"][1])
    s += assistant(gen("end"))


def sent(backend):
    """Requests since the last call of `sent`: one list per session, in order, without ids."""
    sessions = {}
    for request in backend.scheduler.requests:
        if isinstance(request, Append):
            sessions.setdefault(request.session, []).append(("text", tuple(request.token_ids)))
        elif isinstance(request, Generate):
            sessions.setdefault(request.session, []).append(("gen", request.sampling, request.constraint))
        elif isinstance(request, Select):
            sessions.setdefault(request.session, []).append(("select", request.choices, request.method))
        elif isinstance(request, Fork):
            sessions.setdefault(request.session, []).append(("fork", len(request.children)))
    backend.scheduler.requests.clear()
    return [sessions[session] for session in sorted(sessions)]


def variables(state):
    return {name: state.get_var(name) for name in state._branch.variables}


def assert_graph_runs_like_body(backend, program, **arguments):
    """Runs body and graph; asserts equal requests, variables and text. Returns the state of the body's run."""
    state = program.run(temperature=0, **arguments)
    by_body = sent(backend)
    replayed = program.compile(temperature=0).run(**arguments)
    assert sent(backend) == by_body
    assert (variables(replayed), replayed.text()) == (variables(state), state.text())
    return state


def compile_body(body):
    return plait.function(body).compile()


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def marked_comment(place):
    """The comment at the end of the line that an error names."""
    with open(place.filename, encoding="utf-8") as file:
        return "# " + file.read().splitlines()[place.lineno - 1].rpartition("# ")[2]
