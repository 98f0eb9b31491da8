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
from plait.lang.spans.call_spans import Trace, trace_of
from plait.lang.spans.html_page import render_page
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
