"""Writes traces: as an HTML page or a Perfetto file, in a notebook, or in a browser."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from plait.lang.display.notebook import show_html
from plait.lang.html.render import fragment, page
from plait.lang.spans.call_spans import Trace, trace_of
from plait.runtime.errors import InputError
from plait.runtime.results.result_file import may_replace

if TYPE_CHECKING:
    from plait.lang.core.run import Run

PERFETTO_HEAD = {"otherData": {"generator": "plait"}}  # other programs' traces have the same format
PERFETTO_MARK = json.dumps(PERFETTO_HEAD).removesuffix("}").encode()
HTML_MARK = b'<meta name="generator" content="plait">'


def checked_path(where: str, path: str | Path) -> Path:
    """Returns the path. Raises InputError unless its suffix is .html or .json, its folder exists, and a file that it
    replaces is empty or a trace of plait."""
    if Path(path).suffix not in (".html", ".json"):
        raise InputError(f"{where}: the path must end in .html (page) or .json (Perfetto), not {str(path)!r:.80}")
    if not Path(path).parent.is_dir():
        raise InputError(f"{where}: there is no folder {str(Path(path).parent)!r:.200}")
    if not may_replace(Path(path), HTML_MARK, PERFETTO_MARK):
        raise InputError(f"{where}: {str(path)!r:.200} is not a trace of plait; remove it or name another file")
    return Path(path)


def write_traces(runs: Iterable[Run], path: Path) -> None:
    """Waits for the runs and writes their traces to one file. Raises OSError, also if another file is there by then."""
    traces = [_whole_trace(run) for run in runs]
    text = page(traces) if path.suffix == ".html" else _perfetto(traces)
    if not may_replace(path, HTML_MARK, PERFETTO_MARK):  # written since `checked_path`, say by the program itself
        raise FileExistsError(f"{path} is not a trace of plait")
    path.write_text(text, encoding="utf-8", errors="replace")  # as in `fragment`


def show(run: Run, path: str | Path | None) -> Path | None:
    """Writes the trace of a run and returns the path. Without a path, shows it in the notebook and returns None;
    outside a notebook, opens a temporary page in a browser."""
    if path is not None:
        target = checked_path("show", path)
    elif show_html(lambda: fragment("traces", [_whole_trace(run)])) is not None:
        return None
    else:
        with tempfile.NamedTemporaryFile("w", prefix="plait-", suffix=".html", delete=False) as file:
            target = Path(file.name)
    write_traces([run], target)
    if path is None:
        webbrowser.open(target.as_uri())
    return target


def _whole_trace(run: Run) -> Trace:
    """Waits for all calls of the run and returns its trace."""
    for call_segment in run.call_segments():
        call_segment.failure()
    return trace_of(run)


def _perfetto(traces: Iterable[Trace]) -> str:
    events = [event for number, trace in enumerate(traces, 1) for event in trace.perfetto(number)]
    return json.dumps({**PERFETTO_HEAD, "traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)
