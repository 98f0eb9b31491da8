"""The calls of a run as spans of time, in one lane per branch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from plait.lang.core.results import CallSegment, SelectResult
from plait.lang.core.run import Run, run_listeners
from plait.lang.spans.call_progress import CallState, ShownToken, progress_of

_NOT_IN_PERFETTO = ("branch_id", "start_s", "end_s", "tokens")
_FROM_USAGE = ("compile_s", *(f"{what}_tokens" for what in ("cached", "computed", "recomputed", "forced", "drafted")))
MAX_LANES = 100_000  # per program in a Perfetto trace, so that no two programs share a thread number


@dataclass(frozen=True)
class Span:
    """One call. Times are in seconds from the start of the run.

    `start_s`: when the calls before it in its text had ended. `queue_s`, then `prefill_s`: the first parts of the span.
    `compile_s`: the part of `queue_s` in which the call waited for its constraint to be compiled. `lost_tokens`: those
    of a call that has no value. `sample`: its number, from 2 on, among the samples of one gen; otherwise 0.
    """

    branch_id: int
    name: str
    kind: str  # gen or select
    start_s: float
    end_s: float
    queue_s: float
    prefill_s: float
    text: str  # as far as it is there
    error: str | None
    compile_s: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0  # part of sampled_tokens
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    sample: int = 0
    state: CallState = "done"
    tokens: Sequence[ShownToken] = ()  # with their probabilities, if the call has them

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were generated."""
        return self.sampled_tokens + self.forced_tokens + self.lost_tokens


@dataclass(frozen=True)
class Trace:
    """The spans of one run. `branch_parents[i]`: the parent of branch i, None for the first one. `ended_branches`: why
    some were ended before their end. `seconds`: until the last call ended, or until now."""

    program: str
    branch_parents: tuple[int | None, ...]
    spans: tuple[Span, ...]
    seconds: float
    error: str | None
    ended_branches: Mapping[int, str] = field(default_factory=dict)
    state: CallState = "done"

    def perfetto(self, process: int = 1) -> list[dict[str, Any]]:
        """Returns the events in Chrome's trace format, which Perfetto reads: complete events ("X"), in microseconds.

        Perfetto shows complete events of one thread only if they nest, so all times are whole microseconds. Thread
        numbers are unique in a file, and none is 0, which Perfetto reserves for the idle thread.

        Source: the Trace Event Format document (Duncan and others), and Perfetto's FAQ on JSON traces.
        """
        first = process * MAX_LANES + 1
        metadata = {"ph": "M", "pid": process}
        events: list[dict[str, Any]] = [
            {**metadata, "name": "process_name", "tid": first, "args": {"name": self.program}},
            {**metadata, "name": "process_sort_index", "tid": first, "args": {"sort_index": process}},
        ]
        for branch_id in range(len(self.branch_parents)):
            name = {"name": branch_label(self, branch_id)}
            events.append({**metadata, "name": "thread_name", "tid": first + branch_id, "args": name})
            events.append(
                {**metadata, "name": "thread_sort_index", "tid": first + branch_id, "args": {"sort_index": branch_id}}
            )
        for span in self.spans:
            args = {key: value for key, value in asdict(span).items() if key not in _NOT_IN_PERFETTO}
            where = {"ph": "X", "pid": process, "tid": first + span.branch_id, "cat": span.kind}
            events.append({**where, "name": span.name, **_microseconds(span.start_s, span.end_s), "args": args})
            if span.queue_s > 0:
                waited = _microseconds(span.start_s, min(span.end_s, span.start_s + span.queue_s))
                events.append({**where, "name": "queue", "cat": "queue", **waited, "args": {}})
        return events


def branch_label(trace: Trace, branch_id: int) -> str:
    """Returns "main", or "branch 3 of 1" with the numbers of the branch and of its parent (omitted for main)."""
    parent = trace.branch_parents[branch_id]
    return "main" if parent is None else f"branch {branch_id}" + (f" of {parent}" if parent else "")


def trace_of(run: Run) -> Trace:
    """Returns the trace of a run as far as it is. Does not wait: a call that still runs ends now."""
    spans = _spans(run.call_segments(), run, time.monotonic())
    error = None if run.error is None else str(run.error)
    seconds = max((span.end_s for span in spans), default=0.0)
    return Trace(
        run.program, tuple(run.branch_parents), spans, seconds, error, dict(run.ended_branches), run.progress()
    )


@contextmanager
def collect_runs() -> Iterator[list[Run]]:
    """Yields a list that collects every run of this process that begins inside the block."""
    runs: list[Run] = []
    listener = runs.append
    run_listeners.append(listener)
    try:
        yield runs
    finally:
        run_listeners.remove(listener)


def _spans(call_segments: Sequence[CallSegment], run: Run, now_s: float) -> tuple[Span, ...]:
    """Returns the spans. A call is sent before the previous one in its text has ended; its span begins at that end."""
    spans: list[Span] = []
    last_end_s: dict[int, float] = {}
    for call_segment in call_segments:
        end_s = (call_segment.ended_s or now_s) - run.started_s
        began_s, previous_end_s = call_segment.began_s - run.started_s, last_end_s.get(call_segment.branch_id)
        if previous_end_s is None and (parent := run.branch_parents[call_segment.branch_id]) is not None:
            began_s = max(began_s, min(last_end_s.get(parent, 0.0), _served_s(call_segment, end_s)))
        spans.append(_span(call_segment, max(began_s, previous_end_s or 0.0), end_s))
        last_end_s[call_segment.branch_id] = max(previous_end_s or 0.0, end_s)
    return tuple(spans)


def _served_s(call_segment: CallSegment, end_s: float) -> float:
    """Returns when the runtime received the call, which ended at `end_s`; 0 if it does not report it, and `end_s` for a
    call without a value."""
    usage = call_segment.call.usage
    return end_s if usage is None else end_s - usage.wall_s if usage.wall_s else 0.0


def _span(call_segment: CallSegment, start_s: float, end_s: float) -> Span:
    kind = "select" if isinstance(call_segment, SelectResult) else "gen"
    name, now, start_s = call_segment.name or kind, progress_of(call_segment), min(start_s, end_s)
    siblings = call_segment.siblings
    facts: dict[str, Any] = {"sample": siblings.index(call_segment) + 1 if len(siblings) > 1 else 0}
    facts |= {"state": now.state, "tokens": now.tokens}
    usage, queue_s, prefill_s = call_segment.call.usage, 0.0, 0.0
    if usage is not None:
        waited_s = max(0.0, _served_s(call_segment, end_s) - start_s)  # such as for the end of a running step
        queue_s, prefill_s = min(end_s - start_s, waited_s + usage.queue_s), max(0.0, usage.ttft_s - usage.queue_s)
        facts |= {name: getattr(usage, name) for name in _FROM_USAGE}
        facts["sampled_tokens"] = usage.completion_tokens - usage.forced_tokens
    elif now.state == "running":
        facts["sampled_tokens"] = call_segment.call.num_tokens
        if call_segment.call.first_token_time is None:
            queue_s = end_s - start_s
    else:
        facts["lost_tokens"] = call_segment.call.num_tokens
    return Span(call_segment.branch_id, name, kind, start_s, end_s, queue_s, prefill_s, now.text, now.error, **facts)


def _microseconds(start_s: float, end_s: float) -> dict[str, int]:
    """Rounds both ends before taking the difference, so that the next call does not begin inside this one."""
    start, end = round(start_s * 1e6), round(end_s * 1e6)
    return {"ts": start, "dur": max(0, end - start)}
