"""Seeing what a program did: spans and lanes, the page, the Perfetto trace, a notebook's cell, `plait run --trace`."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_scheduler import Gate

import plait
from plait import assistant, gen, select, user
from plait.cli import main
from plait.lang.spans.call_spans import Span, Trace, collect_runs, trace_of
from plait.lang.spans.html_page import _shares, render_page
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Usage


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


def test_a_lane_for_each_branch_and_a_span_for_each_call(backend):
    trace = trace_of(program.run()._run)
    assert trace.program == "program" and trace.error is None
    assert trace.lanes == (None, 0, 0, 2, 0), "main, two branches, one of the second, the second sample"
    spans = [(span.lane, span.name, span.kind, span.text) for span in trace.spans]
    assert spans == [
        (0, "first", "gen", " fine."),
        (1, "tip", "gen", " fine."),
        (2, "tip", "gen", " fine."),
        (3, "deep", "gen", " fine."),
        (0, "kind", "select", "yes"),
        (0, "two", "gen", " fine."),
        (4, "two", "gen", " fine."),
    ]
    for span in trace.spans:
        assert 0 <= span.start_s <= span.end_s <= trace.seconds
    assert sum(span.sampled_tokens for span in trace.spans) == 6 * 6
    assert trace.spans[1].cached_tokens > 0


def test_times_are_those_of_the_calls(backend):
    gate = Gate("late")
    backend.script(("Q", gate), default="x")

    @plait.function
    def slow(s):
        s += "Q" + gen("x")

    state = slow.run(stream=True)
    assert gate.reached.wait(5)
    while not state._run.call_segments():  # the call was made; soon the program knows of it
        time.sleep(0.001)
    start = time.monotonic()
    time.sleep(0.02)
    waited = time.monotonic() - start
    gate.open()
    state.sync()
    span = trace_of(state._run).spans[0]
    assert waited <= span.end_s - span.start_s


def answered(lane, began_s, ended_s, **usage):
    result = SimpleNamespace(usage=Usage(**usage))
    call = SimpleNamespace(result=lambda: result)
    fixed = {"name": "x", "failure": lambda: None, "text": lambda: ""}
    return SimpleNamespace(lane=lane, began_s=began_s, ended_s=ended_s, call=call, **fixed)


def test_a_call_begins_when_what_is_ahead_of_it_has_ended_and_all_its_waiting_is_seen():
    call_segments = [
        answered(0, 0.0, 1.0, wall_s=0.8),
        answered(0, 0.1, 2.0, wall_s=1.1),  # the runtime began it before we heard of the end of the first
        answered(1, 0.2, 3.0, wall_s=1.5),  # its branch left before the second call
        answered(0, 2.1, 4.0, wall_s=0.5, queue_s=0.1, compile_s=0.1),  # it waited for 1.4 s to be looked at
        answered(2, 2.2, 2.4),  # of a service that tells no times
    ]
    run = SimpleNamespace(
        program="p", lanes=[None, 0, 1], started_s=0.0, error=None, call_segments=lambda: call_segments
    )
    spans = trace_of(run).spans
    assert [span.start_s for span in spans] == pytest.approx([0.0, 1.0, 1.5, 2.1, 2.2])
    assert [span.queue_s for span in spans] == pytest.approx([0.2, 0.0, 0.0, 1.5, 0.0])
    drawn = dict(_shares(spans[3]))
    assert drawn["compile"] == pytest.approx(0.1 / 1.9) and drawn["queue"] == pytest.approx(1.4 / 1.9)


def test_failures_are_spans_too(backend):
    backend.script(default=CallFailed("no <b>room</b>", "overloaded"))
    state = program.run_batch([{}])[0]
    trace = trace_of(state._run)
    assert trace.error is not None and "room" in trace.spans[0].error
    assert "<b>" not in render_page([trace]) and "no &lt;b&gt;room" in render_page([trace])


class Strict(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += [value or "" for _, value in attrs]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [value or "" for _, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def test_the_page_stands_alone_and_shows_text_and_tokens_on_hover(backend, tmp_path):
    backend.script(default=' <script>alert("x")</script>')
    path = program.run(text="</title><script>").show(tmp_path / "out.html")
    html = path.read_text()
    parser = Strict()
    parser.feed(html)
    assert parser.open == [] and "<script" not in html and "http" not in html.replace("http-equiv", "")
    details = "".join(parser.titles)
    assert '<script>alert("x")</script>' in details and "sampled" in details and "cached" in details
    assert "branch 3 of 2" in html and html.count('class="span"') == 7
    assert html.count("#6aa84f") > 1 and html.count("#9fc5e8") > 1, "sampled and cached tokens have their colours"


def test_colours_share_the_bar_by_time_and_tokens():
    def span(**said):
        fixed = {"lane": 0, "name": "x", "kind": "gen", "text": "", "error": None}
        return Span(**(fixed | {"start_s": 0.0, "end_s": 10.0, "queue_s": 0.0, "prefill_s": 0.0} | said))

    whole = span(queue_s=1.0, prefill_s=3.0, cached_tokens=1, computed_tokens=2, sampled_tokens=1, forced_tokens=1)
    assert dict(_shares(whole)) == pytest.approx(
        {"queue": 0.1, "cached": 0.1, "computed": 0.2, "sampled": 0.3, "forced": 0.3}
    )
    assert dict(_shares(span(kind="select", computed_tokens=4))) == {"computed": 1.0}
    assert dict(_shares(span(error="no"))) == {"failed": 1.0}
    assert render_page([]).count("No program ran") == 1
    assert "<svg" in render_page([Trace("empty", (None,), (), 0.0, None)])


def checked_events(events):
    """The complete events of a Perfetto trace, once all of them are as the Trace Event Format document and Perfetto
    want them: names and times of the right types, every thread named before it is used and used by one process,
    complete events of one thread within each other or apart."""
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
    for event in sorted(complete, key=lambda each: (each["tid"], each["ts"], -each["dur"])):
        around = open_spans.setdefault(event["tid"], [])
        while around and around[-1] <= event["ts"]:
            around.pop()
        end = event["ts"] + event["dur"]
        assert not around or end <= around[-1], "two events of one thread overlap"
        around.append(end)
    return complete


def test_perfetto(backend, tmp_path):
    text = program.run().show(tmp_path / "out.json").read_text()
    events = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["main", "branch 1", "branch 2", "branch 3 of 2", "branch 4"]
    calls = [event for event in checked_events(events) if event["cat"] != "queue"]
    assert len(calls) == 7
    assert calls[0]["args"]["sampled_tokens"] == 6 and calls[0]["args"]["text"] == " fine."


TIMES = st.floats(0, 9, allow_nan=False)
LANES = st.lists(st.integers(0, 99), max_size=5)
ASKED = st.tuples(st.integers(0, 99), TIMES, TIMES, TIMES, TIMES)


@settings(max_examples=300, deadline=None)
@given(LANES, st.lists(ASKED, max_size=12), st.integers(1, 4))
def test_whatever_ran_the_events_of_a_thread_nest(parents, asked, copies):
    """Calls may end in any order, before those ahead of them in their text too, when a branch is ended."""
    lanes = [None, *(parent % (number + 1) for number, parent in enumerate(parents))]
    call_segments = [
        answered(lane % len(lanes), began_s, began_s + took_s, wall_s=wall_s, queue_s=queue_s)
        for lane, began_s, took_s, wall_s, queue_s in asked
    ]
    run = SimpleNamespace(program="p", lanes=lanes, started_s=0.0, error=None, call_segments=lambda: call_segments)
    trace = trace_of(run)
    events = [event for number in range(1, copies + 1) for event in trace.perfetto(number)]
    calls = [event for event in checked_events(events) if event["cat"] != "queue"]
    assert len(calls) == copies * len(call_segments)


def test_show_opens_a_browser_only_without_a_path(backend, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = program.run().show()
    assert opened == [path.as_uri()] and path.read_text().startswith("<!doctype html>")
    path.unlink()
    program.run().show(tmp_path / "a.html")
    assert len(opened) == 1
    with pytest.raises(plait.InputError, match=r".html \(page\) or .json \(Perfetto\)"):
        program.run().show(tmp_path / "a.txt")


def test_a_notebook_shows_the_text_with_gens_marked(backend):
    backend.script(default="<b>bold</b>")
    html = program.run(text="a < b")._repr_html_()
    parser = Strict()
    parser.feed(html)
    assert parser.open == [] and "<b>" not in html and "a &lt; b" in html
    assert 'title="first">&lt;b&gt;bold' in html and 'title="kind">yes' in html and "&lt;|im_start|&gt;" in html
    gate = Gate("late")
    backend.script(default=gate)
    state = program.run(stream=True)
    assert gate.reached.wait(5)
    assert "is still running" in state._repr_html_()
    state.cancel()
    state.error()


def test_plait_run_writes_what_all_programs_did(backend, tmp_path, capsys):
    file = tmp_path / "programs.py"
    file.write_text(
        "import plait\n@plait.function\ndef one(s):\n    s += 'Q' + plait.gen('x')\n"
        "one.run()\none.run_batch([{}, {}])\n"
    )
    for suffix, count in (("html", 'class="span"'), ("json", '"ph": "X"')):
        out = tmp_path / f"out.{suffix}"
        assert main(["run", "--trace", str(out), str(file)]) == 0
        assert out.read_text().count(count) == 3
        assert f"the trace of 3 programs is in {out}" in capsys.readouterr().err
    assert main(["run", "--trace", "out.txt", str(file)]) == 1
    file.write_text(file.read_text() + "raise SystemError('late')\n")
    assert main(["run", "--trace", str(tmp_path / "b.html"), str(file)]) == 1
    assert (tmp_path / "b.html").read_text().count('class="span"') == 3, "a file that fails is shown too"


def test_a_recording_ends(backend):
    with collect_runs() as runs:
        program.run()
    program.run()
    assert len(runs) == 1
    began = time.monotonic()
    assert trace_of(runs[0]).seconds <= began
