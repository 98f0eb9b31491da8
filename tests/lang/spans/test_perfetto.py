"""The Perfetto trace of a run: valid events, one thread per branch, nested complete events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from span_samples import call_segment, program, run_of

from plait.lang.spans.call_spans import trace_of


def check_events(events):
    """Asserts the rules of the Trace Event Format and of Perfetto; returns the complete events.

    Names and times have the right types, a thread is named before its use and belongs to one process, and complete
    events of a thread are nested or disjoint.
    """
    named, open_spans, complete = {}, {}, []
    for event in events:
        assert event["ph"] in ("M", "X") and isinstance(event["name"], str) and event["name"]
        assert all(type(event[key]) is int and event[key] > 0 for key in ("pid", "tid"))
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key = "sort_index" if event["name"].endswith("_sort_index") else "name"
            assert type(event["args"][key]) is (int if key == "sort_index" else str)
            if event["name"] == "thread_name":
                assert event["tid"] not in named
                named[event["tid"]] = event["pid"]
            continue
        assert named[event["tid"]] == event["pid"] and isinstance(event["cat"], str)
        assert type(event["ts"]) is int and type(event["dur"]) is int and event["ts"] >= 0 and event["dur"] >= 0
        complete.append(event)
    for event in sorted(complete, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        enclosing_ends = open_spans.setdefault(event["tid"], [])
        while enclosing_ends and enclosing_ends[-1] <= event["ts"]:
            enclosing_ends.pop()
        end = event["ts"] + event["dur"]
        assert not enclosing_ends or end <= enclosing_ends[-1], "two events of one thread overlap"
        enclosing_ends.append(end)
    return complete


def test_perfetto_trace_has_a_thread_per_branch_and_an_event_per_call(backend, tmp_path):
    text = program.run().show(tmp_path / "out.json").read_text()
    events = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["main", "branch 1", "branch 2", "branch 3 of 2", "branch 4"]
    calls = [event for event in check_events(events) if event["cat"] != "queue"]
    assert len(calls) == 7
    assert calls[0]["args"]["sampled_tokens"] == 6 and calls[0]["args"]["text"] == " fine."


TIMES = st.floats(0, 9, allow_nan=False)
LANES = st.lists(st.integers(0, 99), max_size=5)
CALLS = st.tuples(st.integers(0, 99), TIMES, TIMES, TIMES, TIMES)


@settings(max_examples=300, deadline=None)
@given(LANES, st.lists(CALLS, max_size=12), st.integers(1, 4))
def test_events_of_a_thread_nest_for_any_calls(parents, call_tuples, copies):
    """Calls may end in any order: an ended branch ends a call before the calls ahead of it."""
    branch_parents = [None, *(parent % (number + 1) for number, parent in enumerate(parents))]
    call_segments = [
        call_segment(branch_id % len(branch_parents), began_s, began_s + took_s, wall_s=wall_s, queue_s=queue_s)
        for branch_id, began_s, took_s, wall_s, queue_s in call_tuples
    ]
    trace = trace_of(run_of(call_segments, branch_parents))
    events = [event for number in range(1, copies + 1) for event in trace.perfetto(number)]
    calls = [event for event in check_events(events) if event["cat"] != "queue"]
    assert len(calls) == copies * len(call_segments)
