"""Spans and lanes of a run: one lane per branch, one span per call, start and queue times, collected runs."""

from __future__ import annotations

import time

import pytest
from scripted_scheduler import Gate
from span_samples import call_segment, program, run_of

import plait
from plait import gen
from plait.lang.html.filters import shares
from plait.lang.html.render import page
from plait.lang.spans.call_spans import collect_runs, trace_of
from plait.runtime.errors import CallFailed


def test_trace_has_a_lane_per_branch_and_a_span_per_call(backend):
    trace = trace_of(program.run()._run)
    assert trace.program == "program" and trace.error is None
    assert trace.branch_parents == (None, 0, 0, 2, 0), "main, two branches, a branch of the second, the second sample"
    spans = [(span.branch_id, span.name, span.kind, span.text) for span in trace.spans]
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


def test_span_covers_the_time_that_its_call_waited(backend):
    gate = Gate("late")
    backend.script(("Q", gate), default="x")

    @plait.function
    def slow(s):
        s += "Q" + gen("x")

    state = slow.run(stream=True)
    assert gate.reached.wait(60)
    while not state._run.call_segments():  # the request was sent; the program records it shortly after
        time.sleep(0.001)
    start = time.monotonic()
    time.sleep(0.02)
    waited = time.monotonic() - start
    gate.open()
    state.sync()
    span = trace_of(state._run).spans[0]
    assert waited <= span.end_s - span.start_s


def test_span_starts_after_the_calls_before_it_and_counts_all_queue_time():
    call_segments = [
        call_segment(0, 0.0, 1.0, wall_s=0.8),
        # The runtime started it before the client learned of the end of the first.
        call_segment(0, 0.1, 2.0, wall_s=1.1),
        call_segment(1, 0.2, 3.0, wall_s=1.5),  # its branch was forked before the second call
        call_segment(0, 2.1, 4.0, wall_s=0.5, queue_s=0.1, compile_s=0.1),  # it waited 1.4 s
        call_segment(2, 2.2, 2.4),  # of a service that reports no times
    ]
    spans = trace_of(run_of(call_segments, [None, 0, 1])).spans
    assert [span.start_s for span in spans] == pytest.approx([0.0, 1.0, 1.5, 2.1, 2.2])
    assert [span.queue_s for span in spans] == pytest.approx([0.2, 0.0, 0.0, 1.5, 0.0])
    colours = dict(shares(spans[3]))
    assert colours["compile"] == pytest.approx(0.1 / 1.9) and colours["queue"] == pytest.approx(1.4 / 1.9)


def test_span_without_a_value_starts_after_the_text_that_its_branch_was_forked_from():
    lost = call_segment(1, 0.1, 3.0)
    lost.call.usage = None
    spans = trace_of(run_of([call_segment(0, 0.0, 1.0, wall_s=0.9), lost], [None, 0])).spans
    assert spans[1].start_s == 1.0 and spans[1].end_s == 3.0


def test_failed_calls_are_spans_with_escaped_errors(backend):
    backend.script(default=CallFailed("no <b>room</b>", "overloaded"))
    state = program.run_batch([{}])[0]
    trace = trace_of(state._run)
    assert trace.error is not None and "room" in trace.spans[0].error
    assert "<b>room" not in page([trace]) and "no &lt;b&gt;room" in page([trace])


def test_collect_runs_ends_with_its_block(backend):
    with collect_runs() as runs:
        program.run()
    program.run()
    assert len(runs) == 1
    began = time.monotonic()
    assert trace_of(runs[0]).seconds <= began
