"""Writes traces: as an HTML page or a Perfetto file, in a browser, and the text of a state for notebooks."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from plait.lang.core.results import CallSegment, Samples, TextSegment
from plait.lang.spans.call_spans import Span, Trace, branch_label, trace_of
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.core.run import Run

_GENERATED_STYLE = "background:#dff0d8;border-radius:3px"
_TEMPLATE_STYLE = "color:#999"


def checked_path(where: str, path: str | Path) -> Path:
    """Returns the path. Raises InputError unless its suffix is .html or .json, and its folder exists."""
    if Path(path).suffix not in (".html", ".json"):
        raise InputError(f"{where}: the path must end in .html (page) or .json (Perfetto), not {str(path)!r:.80}")
    if not Path(path).parent.is_dir():
        raise InputError(f"{where}: there is no folder {str(Path(path).parent)!r:.200}")
    return Path(path)


def write_traces(runs: Iterable[Run], path: Path) -> None:
    """Waits for the runs and writes their traces to one file."""
    traces = [trace_of(run) for run in runs]
    path.write_text(render_page(traces) if path.suffix == ".html" else _perfetto(traces), encoding="utf-8")


def show(run: Run, path: str | Path | None) -> Path:
    """Writes the trace of a run and returns the path. Without a path, opens a temporary page in a browser."""
    if path is not None:
        target = checked_path("show", path)
        write_traces([run], target)
        return target
    with tempfile.NamedTemporaryFile("w", prefix="plait-", suffix=".html", delete=False) as file:
        target = Path(file.name)
    write_traces([run], target)
    webbrowser.open(target.as_uri())
    return target


def as_html(branch: Branch) -> str:
    """Returns the text of a state for notebooks: generated text is highlighted, the chat template is grey."""
    if not branch.run.ended or not all(call_segment.call.done() for call_segment in branch.run.call_segments()):
        return f"<pre>{escape(f'program {branch.run.program!r} is still running')}</pre>"
    parts = []
    for segment in list(branch.segments):
        try:
            text = escape(segment.text())
        except PlaitError as error:
            parts.append(f'<span style="color:#a61c00">{escape(str(error))}</span>')
            continue
        if isinstance(segment, CallSegment | Samples):
            name = segment.call_segments[0].name if isinstance(segment, Samples) else segment.name
            text = f'<span style="{_GENERATED_STYLE}" title="{escape(name or "gen")}">{text}</span>'
        elif isinstance(segment, TextSegment) and segment.control:
            text = f'<span style="{_TEMPLATE_STYLE}">{text}</span>'
        parts.append(text)
    return f'<pre style="white-space:pre-wrap">{"".join(parts)}</pre>'


def _perfetto(traces: Iterable[Trace]) -> str:
    events = [event for number, trace in enumerate(traces, 1) for event in trace.perfetto(number)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)


# -- html page ------------------------------------------------------------------------------------
# Renders traces as one self-contained HTML page: lanes over time, with details on hover.

_WIDTH, _LEFT, _RIGHT, _ROW, _BAR, _TOP = 1100, 110, 30, 34, 24, 24
_MIN_BAR = 2.0  # pixels
_COLOURS = {
    "queue": ("#c9c9c9", "waiting to be admitted"),
    "compile": ("#c8b6dd", "waiting for its constraint to be compiled"),
    "cached": ("#9fc5e8", "prompt tokens from the cache"),
    "computed": ("#3d6fb4", "prompt tokens computed"),
    "sampled": ("#6aa84f", "tokens sampled"),
    "forced": ("#f1c232", "tokens forced by a constraint"),
    "failed": ("#cc4125", "failed or ended"),
}
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }
h2 { margin: 28px 0 4px; font-size: 16px; } p { margin: 2px 0 10px; color: #555; }
svg { display: block; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
g.span:hover rect { stroke: #000; stroke-width: 1; }
.key span { display: inline-block; margin-right: 18px; } .key i { display: inline-block; width: 12px; height: 12px;
margin-right: 5px; vertical-align: -1px; } .error { color: #a61c00; white-space: pre-wrap; }
"""


def render_page(traces: Iterable[Trace]) -> str:
    """Returns the page. All text of programs is escaped."""
    key = "".join(f'<span><i style="background:{c}"></i>{escape(label)}</span>' for c, label in _COLOURS.values())
    body = "".join(map(_section, traces)) or "<p>No program ran.</p>"
    head = f'<meta charset="utf-8"><title>plait: what ran</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><div class="key">{key}</div>{body}</body></html>\n'


def _section(trace: Trace) -> str:
    cached = sum(span.cached_tokens for span in trace.spans)
    computed = sum(span.computed_tokens for span in trace.spans)
    generated = sum(span.sampled_tokens + span.forced_tokens for span in trace.spans)
    summary = (
        f"{len(trace.spans)} calls in {trace.seconds:.3f} s; prompt tokens: {computed} computed, {cached} cached; "
    )
    summary += f"{generated} generated"
    error = f'<p class="error">{escape(trace.error)}</p>' if trace.error else ""
    return f"<h2>{escape(trace.program)}</h2><p>{summary}</p>{error}{_chart(trace)}"


def _chart(trace: Trace) -> str:
    per_second = (_WIDTH - _LEFT - _RIGHT) / max(trace.seconds, 1e-6)
    height = _TOP + _ROW * len(trace.branch_parents) + 6
    parts = [f'<svg width="{_WIDTH}" height="{height}" role="img">', *_axis(trace.seconds, per_second, height)]
    for branch_id in range(len(trace.branch_parents)):
        y = _TOP + branch_id * _ROW + _BAR * 0.7
        parts.append(f'<text x="0" y="{y:.0f}">{escape(branch_label(trace, branch_id))}</text>')
    parts += [_bar(span, per_second) for span in trace.spans]
    return "".join([*parts, "</svg>"])


def _axis(seconds: float, per_second: float, height: int) -> list[str]:
    ticks = [seconds * i / 5 for i in range(6)]
    lines = []
    for tick in ticks:
        x = _LEFT + tick * per_second
        lines.append(f'<line x1="{x:.1f}" y1="16" x2="{x:.1f}" y2="{height}" stroke="#eee"/>')
        lines.append(f'<text x="{x:.1f}" y="11" text-anchor="middle">{tick:.3g} s</text>')
    return lines


def _bar(span: Span, per_second: float) -> str:
    x, y = _LEFT + span.start_s * per_second, _TOP + span.branch_id * _ROW
    width = max(_MIN_BAR, (span.end_s - span.start_s) * per_second)
    rects = []
    for kind, share in _shares(span):
        rects.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width * share:.1f}" height="{_BAR}" fill="{_COLOURS[kind][0]}"/>'
        )
        x += width * share
    label = f'<text x="{x - width + 4:.1f}" y="{y + 16}">{escape(span.name[: int(width / 7)])}</text>'
    return f'<g class="span"><title>{escape(_details(span))}</title>{"".join(rects)}{label}</g>'


def _shares(span: Span) -> list[tuple[str, float]]:
    """Returns each colour's share of the bar: queue, prompt and answer by time; the last two are split by tokens."""
    if span.error is not None:
        return [("failed", 1.0)]
    duration_s = max(span.end_s - span.start_s, 1e-9)
    queue = min(1.0, span.queue_s / duration_s)
    prefill = min(1.0 - queue, span.prefill_s / duration_s) if span.prefill_s else 0.0
    answer = 1.0 - queue - prefill
    if not span.sampled_tokens + span.forced_tokens:  # such as a select, which only computes its prompt
        prefill, answer = prefill + answer, 0.0
    compiling = min(queue, span.compile_s / duration_s)
    parts = [("compile", compiling), ("queue", queue - compiling)]
    parts += [*_split(prefill, cached=span.cached_tokens, computed=span.computed_tokens)]
    parts += _split(answer, sampled=span.sampled_tokens, forced=span.forced_tokens)
    return [(kind, share) for kind, share in parts if share > 0]


def _split(share: float, **tokens: int) -> list[tuple[str, float]]:
    total = sum(tokens.values())
    return [(kind, share * count / total) for kind, count in tokens.items()] if total else [(next(iter(tokens)), share)]


def _details(span: Span) -> str:
    times = f"{span.start_s:.3f} s to {span.end_s:.3f} s, {span.queue_s:.3f} s of it in the queue"
    times += f" ({span.compile_s:.3f} s for its constraint)" if span.compile_s else ""
    if span.error is not None:
        return f"{span.kind} {span.name}\n{times}\n{span.error}"
    tokens = f"prompt: {span.computed_tokens} computed, {span.cached_tokens} cached"
    generated = f"answer: {span.sampled_tokens} sampled, {span.forced_tokens} forced"
    return f"{span.kind} {span.name}\n{times}\n{tokens}\n{generated}\n\n{span.text}"
