"""The calls of a run as spans of time on lanes, one lane for each branch.

Knows: answers and their usage. Must not know: how spans are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from plait.lang.answers import Answer, Chosen
from plait.lang.run import Run, on_start
from plait.runtime.errors import PlaitError


@dataclass(frozen=True)
class Span:
    """One call. Seconds are from the start of the run; `queue_s` and `prefill_s` are parts of it from its start on."""

    lane: int
    name: str
    kind: str  # gen or select
    start_s: float
    end_s: float
    queue_s: float
    prefill_s: float
    text: str
    error: str | None
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
        """The events of Chrome's trace format, which Perfetto reads: complete events ("X"), times in microseconds."""
        said = [{"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": self.program}}]
        events: list[dict[str, Any]] = [*said]
        for lane in range(len(self.lanes)):
            name = {"name": lane_name(self, lane)}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": name})
        for span in self.spans:
            args = {key: value for key, value in asdict(span).items() if key not in ("lane", "start_s", "end_s")}
            where = {"ph": "X", "pid": process, "tid": span.lane, "cat": span.kind}
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
    answers = run.answers()
    spans = tuple(_span(answer, run.started_s) for answer in answers)
    error = None if run.error is None else str(run.error)
    return Trace(run.program, tuple(run.lanes), spans, max((each.end_s for each in spans), default=0.0), error)


@contextmanager
def recording() -> Iterator[list[Run]]:
    """Collects every run of this process that begins inside, in the list given."""
    runs: list[Run] = []
    listener = runs.append
    on_start.append(listener)
    try:
        yield runs
    finally:
        on_start.remove(listener)


def _span(answer: Answer, origin_s: float) -> Span:
    failure = answer.failure()
    kind = "select" if isinstance(answer, Chosen) else "gen"
    end_s = answer.ended_s - origin_s
    began_s = min(end_s, answer.began_s - origin_s)
    name = answer.name or kind
    if failure is not None:
        return Span(answer.lane, name, kind, began_s, end_s, 0.0, 0.0, "", str(failure))
    usage = answer.call.result().usage
    # a call is sent before the one ahead of it in the text is done: it runs for its last wall_s
    start_s = max(began_s, end_s - usage.wall_s) if usage.wall_s else began_s
    return Span(
        answer.lane,
        name,
        kind,
        start_s,
        end_s,
        usage.queue_s,
        max(0.0, usage.ttft_s - usage.queue_s),
        _text(answer),
        None,
        usage.cached_tokens,
        usage.computed_tokens,
        usage.completion_tokens - usage.forced_tokens,
        usage.forced_tokens,
    )


def _text(answer: Answer) -> str:
    try:
        return answer.text()
    except PlaitError as error:
        return str(error)


def _microseconds(start_s: float, end_s: float) -> dict[str, float]:
    return {"ts": round(start_s * 1e6, 1), "dur": round(max(0.0, end_s - start_s) * 1e6, 1)}
