"""Traces as HTML: the calls of each program as rows below their branches, over time. A click on a row opens its text.

The same sections are shown in notebooks, and make a page that is one file without scripts.
"""

from __future__ import annotations

import hashlib
import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from plait.lang.display.html import STYLE, box, counted, fragment, key, pre, seconds, state_mark
from plait.lang.display.texts import PROBABILITIES, tokens_html
from plait.lang.spans.call_spans import Span, Trace, branch_label

MAX_OPEN_RUNS = 5  # with more, the reader opens what is of interest
MAX_INDENTS = 8
_PEEK_CHARS = 160
_MIN_BAR = 0.4  # percent of the time axis


@dataclass(frozen=True)
class Row:
    """A call of a branch, or None for a branch without calls. `depth`: number of branches above its own. `is_first`:
    whether it is the first of its branch."""

    branch_id: int
    depth: int
    span: Span | None
    is_first: bool


def page_html(traces: Sequence[Trace]) -> str:
    """Returns a page: one file, which loads nothing and runs nothing."""
    digest = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = ", ".join(dict.fromkeys(trace.program for trace in traces))[:80]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>plait: {escape(title)}</title><style>{STYLE}</style>'
    )
    body = f"<h1>What ran</h1>{sections(traces)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body class="plait page">{body}</body></html>\n'


def traces_html(traces: Sequence[Trace]) -> str:
    """Returns a display for a notebook."""
    return fragment(sections(traces))


def sections(traces: Sequence[Trace]) -> str:
    """Returns a section for each program."""
    is_open = " open" if len(traces) <= MAX_OPEN_RUNS else ""
    return "".join(_section(trace, is_open) for trace in traces) or '<p class="soft">No program ran.</p>'


def rows(trace: Trace) -> list[Row]:
    """Returns the calls in the order in which the program made them, with each branch as a whole where its first call
    belongs."""
    parents, last = trace.branch_parents, len(trace.spans)
    first = [last] * len(parents)  # for each branch, the number of the first call of it and of the branches below it
    for number, span in reversed(list(enumerate(trace.spans))):
        first[span.branch_id] = number
    for branch_id, parent in reversed(list(enumerate(parents))):  # a parent has a lower number than its branches
        if parent is not None:
            first[parent] = min(first[parent], first[branch_id])
    paths: list[tuple[tuple[int, int], ...]] = []
    for branch_id, parent in enumerate(parents):
        paths.append((*(() if parent is None else paths[parent]), (first[branch_id], branch_id)))
    with_calls = {span.branch_id for span in trace.spans}
    entries = [
        ((*paths[span.branch_id], (number, -1)), span.branch_id, span) for number, span in enumerate(trace.spans)
    ]
    empty = [(path, branch_id, None) for branch_id, path in enumerate(paths) if branch_id not in with_calls]
    found, seen = list[Row](), set[int]()
    for _, branch_id, span_or_none in sorted([*entries, *empty], key=lambda entry: entry[0]):
        found.append(Row(branch_id, len(paths[branch_id]) - 1, span_or_none, branch_id not in seen))
        seen.add(branch_id)
    return found


def ticks(length: float, most: int = 5) -> list[float]:
    """Returns round numbers from 0 to `length`, at most `most` + 1: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.93), ticks(0.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [0.0])
    """
    if length <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(length / most))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) * most >= length * (1 - 1e-9))
    return [round(number * step, 9) for number in range(math.floor(length / step + 1e-9) + 1)]


def _section(trace: Trace, is_open: str) -> str:
    num_branches = len(trace.branch_parents)
    size = f"{counted(len(trace.spans), 'call')} on {counted(num_branches, 'branch', 'branches')}"
    size = box("soft", f"{size}, {seconds(trace.seconds)}", tag="span")
    head = box("head", f"<b>{escape(trace.program)}</b>", state_mark(trace.state), size, tag="span")
    error = box("bad", escape(trace.error), tag="p") if trace.error else ""
    lines = "".join(_row(trace, row) for row in rows(trace))
    chart = box("calls", _grid(trace.seconds), lines)
    return (
        f'<details class="run"{is_open}><summary>{head}</summary>{error}{key(_amounts(trace.spans))}{chart}</details>'
    )


def _amounts(spans: Iterable[Span]) -> dict[str, object]:
    """Returns the tokens of each cause, and the seconds of waiting: the numbers behind the colours."""
    amounts: dict[str, object] = {
        kind: f"{count:,}"
        for kind in ("cached", "computed", "recomputed", "sampled", "drafted", "forced", "lost")
        if (count := sum(_tokens(span)[kind] for span in spans))
    }
    waited, compiled = sum(span.queue_s - span.compile_s for span in spans), sum(span.compile_s for span in spans)
    amounts |= {"queue": seconds(waited) if waited >= 5e-4 else 0, "compile": seconds(compiled) if compiled else 0}
    states = [span.state for span in spans]
    return amounts | {state: states.count(state) for state in ("running", "failed", "cancelled") if state in states}


def _tokens(span: Span) -> dict[str, int]:
    return {
        "cached": span.cached_tokens,
        "computed": span.computed_tokens,
        "recomputed": span.recomputed_tokens,
        "sampled": span.sampled_tokens - span.drafted_tokens,
        "drafted": span.drafted_tokens,
        "forced": span.forced_tokens,
        "lost": span.lost_tokens,
    }


def _grid(length: float) -> str:
    """Returns the lines and the labels of the time axis, behind the rows."""
    parts = []
    for tick in ticks(length):
        x = f"{100 * tick / length if length else 0:.2f}%"
        label = "0" if not tick else f"{tick * 1000:g} ms" if length < 1 else f"{tick:g} s"
        anchor = "start" if not tick else "end" if tick > 0.93 * length else "middle"
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="18" y2="100%"/><text x="{x}" y="12" text-anchor="{anchor}">{label}</text>'
        )
    return f'<svg class="grid" aria-hidden="true">{"".join(parts)}</svg>'


def _row(trace: Trace, row: Row) -> str:
    span, reason = row.span, trace.ended_branches.get(row.branch_id)
    label = f"sample {span.sample}" if span is not None and span.sample > 1 else f"branch {row.branch_id}"
    chip = (
        box("", escape(label), tag="em", title=branch_label(trace, row.branch_id)) if row.depth and row.is_first else ""
    )
    if reason and row.is_first:
        chip += state_mark("cancelled", reason)
    text = escape(span.name) if span is not None else '<span class="soft">no calls</span>'
    name = box("name", "<i></i>" * min(row.depth, MAX_INDENTS), chip, f"<span>{text}</span>", tag="span")
    ended = " ended" if reason else ""
    if span is None:
        return box(f"call{ended}", f"<summary>{name}</summary>", tag="details")
    num_tokens = span.sampled_tokens + span.forced_tokens + span.lost_tokens
    number = seconds(span.end_s - span.start_s) + (f" · {num_tokens:,} tok" if num_tokens else "")
    peek = " ".join((span.error if span.state == "failed" and span.error else span.text).split())
    shown = escape(peek[-_PEEK_CHARS:] if span.state == "running" else peek[:_PEEK_CHARS])
    line = f'{name}{_bar(span, trace.seconds)}<span class="num">{number}</span><span class="peek">{shown}</span>'
    return box(f"call {span.kind}{ended}", f"<summary>{line}</summary>{_body(span, reason)}", tag="details")


def _body(span: Span, reason: str | None) -> str:
    times = f"{span.kind} {span.name}: {span.start_s:.3f} s to {span.end_s:.3f} s"
    lines = [box("soft", escape(times), tag="p"), key(_amounts([span]))]
    note = reason if reason and span.state != "failed" else span.error
    lines.append(box("bad" if span.state == "failed" else "soft", escape(note), tag="p") if note else "")
    text, legend = tokens_html(span.tokens) or escape(span.text), PROBABILITIES if span.tokens else ""
    return box("body", *lines, pre(text), legend)


def _bar(span: Span, length: float) -> str:
    scale = 100 / max(length, 1e-9)
    x, width = span.start_s * scale, max(_MIN_BAR, (span.end_s - span.start_s) * scale)
    x, parts = min(x, 100 - width), []
    for kind, share in shares(span):
        parts.append(f'<rect class="{kind}" x="{x:.2f}%" width="{width * share:.2f}%" height="12"/>')
        x += width * share
    return f'<svg class="bar" aria-hidden="true">{"".join(parts)}</svg>'


def shares(span: Span) -> list[tuple[str, float]]:
    """Returns each colour's share of the bar: queue, prompt and answer by time; the last two are split by tokens."""
    if span.state in ("failed", "cancelled"):
        return [(span.state, 1.0)]
    duration_s = max(span.end_s - span.start_s, 1e-9)
    queue = min(1.0, span.queue_s / duration_s)
    if span.state == "running":
        return [("queue", queue), ("running", 1.0 - queue)]
    prefill = min(1.0 - queue, span.prefill_s / duration_s) if span.prefill_s else 0.0
    answer = 1.0 - queue - prefill
    if not span.sampled_tokens + span.forced_tokens:  # such as a select, which only computes its prompt
        prefill, answer = prefill + answer, 0.0
    compiling, tokens = min(queue, span.compile_s / duration_s), _tokens(span)
    parts = [("compile", compiling), ("queue", queue - compiling)]
    parts += _split(prefill, cached=tokens["cached"], computed=tokens["computed"])
    parts += _split(answer, sampled=tokens["sampled"], drafted=tokens["drafted"], forced=tokens["forced"])
    return [(kind, share) for kind, share in parts if share > 0]


def _split(share: float, **tokens: int) -> list[tuple[str, float]]:
    total = sum(tokens.values())
    return [(kind, share * count / total) for kind, count in tokens.items()] if total else [(next(iter(tokens)), share)]
