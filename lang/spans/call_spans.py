"""The calls of a run as spans of time on lanes, one lane for each branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from plait.lang.core.results import CallSegment, SelectResult
from plait.lang.core.run import Run, run_listeners
from plait.runtime.errors import PlaitError

MAX_LANES = 100_000  # of one program in a Perfetto trace, so that no two programs share a thread's number


@dataclass(frozen=True)
class Span:
    """One call. Seconds are from the start of the run. `start_s`: when nothing ahead of it in its text was left to do.
    `queue_s` and then `prefill_s` are parts of it from its start on; `compile_s` is the part of `queue_s` in which it
    waited for its own constraint to be compiled."""

    lane: int
    name: str
    kind: str  # gen or select
    start_s: float
    end_s: float
    queue_s: float
    prefill_s: float
    text: str
    error: str | None
    compile_s: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0


@dataclass(frozen=True)
class Trace:
    """`lanes[i]` is the lane that lane i was forked from, None for the first."""

    program: str
    lanes: tuple[int | None, ...]
    spans: tuple[Span, ...]
    seconds: float
    error: str | None

    def perfetto(self, process: int = 1) -> list[dict[str, Any]]:
        """The events of Chrome's trace format, which Perfetto reads: complete events ("X"), times in microseconds.

        Complete events of one thread only nest: Perfetto shows no others. So all times are whole microseconds. No two
        threads of a file have one number, and none has 0, which Perfetto keeps for the idle thread.

        Source: the Trace Event Format document (Duncan and others), and Perfetto's FAQ on JSON traces.
        """
        first = process * MAX_LANES + 1
        said = {"ph": "M", "pid": process}
        events: list[dict[str, Any]] = [
            {**said, "name": "process_name", "tid": first, "args": {"name": self.program}},
            {**said, "name": "process_sort_index", "tid": first, "args": {"sort_index": process}},
        ]
        for lane in range(len(self.lanes)):
            name = {"name": lane_name(self, lane)}
            events.append({**said, "name": "thread_name", "tid": first + lane, "args": name})
            events.append({**said, "name": "thread_sort_index", "tid": first + lane, "args": {"sort_index": lane}})
        for span in self.spans:
            args = {key: value for key, value in asdict(span).items() if key not in ("lane", "start_s", "end_s")}
            where = {"ph": "X", "pid": process, "tid": first + span.lane, "cat": span.kind}
            events.append({**where, "name": span.name, **_microseconds(span.start_s, span.end_s), "args": args})
            if span.queue_s > 0:
                waited = _microseconds(span.start_s, min(span.end_s, span.start_s + span.queue_s))
                events.append({**where, "name": "queue", "cat": "queue", **waited, "args": {}})
        return events


def lane_name(trace: Trace, lane: int) -> str:
    parent = trace.lanes[lane]
    return "main" if parent is None else f"branch {lane}" + (f" of {parent}" if parent else "")


def trace_of(run: Run) -> Trace:
    """What the run did, once all its calls are done: waits for them."""
    call_segments = run.call_segments()
    spans = _spans(call_segments, run)
    error = None if run.error is None else str(run.error)
    return Trace(run.program, tuple(run.lanes), spans, max((each.end_s for each in spans), default=0.0), error)


@contextmanager
def collect_runs() -> Iterator[list[Run]]:
    """Collects every run of this process that begins inside, in the list given."""
    runs: list[Run] = []
    listener = runs.append
    run_listeners.append(listener)
    try:
        yield runs
    finally:
        run_listeners.remove(listener)


def _spans(call_segments: Sequence[CallSegment], run: Run) -> tuple[Span, ...]:
    """A call is sent before the one ahead of it in the text is done: it begins when that has ended."""
    spans: list[Span] = []
    ended: dict[int, float] = {}
    for call_segment in call_segments:
        began_s, ahead = call_segment.began_s - run.started_s, ended.get(call_segment.lane)
        if ahead is None and (parent := run.lanes[call_segment.lane]) is not None:
            began_s = max(began_s, min(ended.get(parent, 0.0), _served_s(call_segment, run.started_s)))
        spans.append(_span(call_segment, max(began_s, ahead or 0.0), run.started_s))
        ended[call_segment.lane] = max(ahead or 0.0, spans[-1].end_s)
    return tuple(spans)


def _served_s(call_segment: CallSegment, origin_s: float) -> float:
    """When the runtime came to the call, as far as it says."""
    usage = None if call_segment.failure() is not None else call_segment.call.result().usage
    return call_segment.ended_s - origin_s - usage.wall_s if usage is not None and usage.wall_s else 0.0


def _span(call_segment: CallSegment, start_s: float, origin_s: float) -> Span:
    failure = call_segment.failure()
    kind = "select" if isinstance(call_segment, SelectResult) else "gen"
    end_s = call_segment.ended_s - origin_s
    start_s = min(start_s, end_s)
    name = call_segment.name or kind
    if failure is not None:
        return Span(call_segment.lane, name, kind, start_s, end_s, 0.0, 0.0, "", str(failure))
    usage = call_segment.call.result().usage
    waited_s = max(0.0, _served_s(call_segment, origin_s) - start_s)  # for a step under way to end, say
    return Span(
        call_segment.lane,
        name,
        kind,
        start_s,
        end_s,
        min(end_s - start_s, waited_s + usage.queue_s),
        max(0.0, usage.ttft_s - usage.queue_s),
        _text(call_segment),
        None,
        usage.compile_s,
        usage.cached_tokens,
        usage.computed_tokens,
        usage.completion_tokens - usage.forced_tokens,
        usage.forced_tokens,
    )


def _text(call_segment: CallSegment) -> str:
    try:
        return call_segment.text()
    except PlaitError as error:
        return str(error)


def _microseconds(start_s: float, end_s: float) -> dict[str, int]:
    """Both ends rounded before their difference is taken: what follows a call does not begin within it."""
    start, end = round(start_s * 1e6), round(end_s * 1e6)
    return {"ts": start, "dur": max(0, end - start)}
