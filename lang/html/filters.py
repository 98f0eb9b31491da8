"""What the template computes: the rows, bars and ticks of a trace, and numbers as texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.spans.call_spans import Span, Trace
    from plait.lang.usage import ProgramUsage

_PEEK_CHARS = 160
_MIN_BAR = 0.4  # percent of the time axis
_TOKENS = ("cached", "computed", "recomputed", "sampled", "drafted", "forced", "lost")


@dataclass(frozen=True)
class Row:
    """A call of a branch, or None for a branch without calls. `depth`: number of branches above its own. `is_first`:
    whether it is the first of its branch. `label`: the name of the branch."""

    branch_id: int
    depth: int
    span: Span | None
    is_first: bool
    label: str


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
        sample = 0 if span_or_none is None else span_or_none.sample
        label = f"sample {sample}" if sample > 1 else f"branch {branch_id}"
        found.append(Row(branch_id, len(paths[branch_id]) - 1, span_or_none, branch_id not in seen, label))
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


def tick_label(tick: float, length: float) -> str:
    return "0" if not tick else f"{tick * 1000:g} ms" if length < 1 else f"{tick:g} s"


def seconds(value: float) -> str:
    """Returns a duration, in milliseconds where it is short.

    >>> seconds(0.0312), seconds(2.5)
    ('31 ms', '2.50 s')
    """
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def span_amounts(spans: Sequence[Span]) -> dict[str, object]:
    """Returns the tokens of each cause, the seconds of waiting, and the number of calls without a value."""
    counts = [(kind, sum(_tokens(span)[kind] for span in spans)) for kind in _TOKENS]
    waits = [("queue", sum(span.queue_s - span.compile_s for span in spans))]
    waits.append(("compile", sum(span.compile_s for span in spans)))
    amounts: dict[str, object] = {kind: f"{count:,}" for kind, count in counts if count}
    amounts |= {kind: seconds(wait_s) for kind, wait_s in waits if wait_s >= 5e-4}
    states = [span.state for span in spans]
    return amounts | {state: states.count(state) for state in ("running", "failed", "cancelled")}


def _tokens(span: Span) -> dict[str, int]:
    counts: dict[str, int] = {kind: getattr(span, f"{kind}_tokens") for kind in _TOKENS}
    return counts | {"sampled": span.sampled_tokens - span.drafted_tokens}


def peek(span: Span) -> str:
    """Returns a line of the text: its end while it grows, then its beginning."""
    text = " ".join((span.error if span.state == "failed" and span.error else span.text).split())
    return text[-_PEEK_CHARS:] if span.state == "running" else text[:_PEEK_CHARS]


def bar(span: Span, length: float) -> Iterable[tuple[str, float, float]]:
    """Yields the pieces of a bar: colour, left end and width, in percent of the time axis."""
    scale = 100 / max(length, 1e-9)
    whole = max(_MIN_BAR, (span.end_s - span.start_s) * scale)
    x = min(span.start_s * scale, 100 - whole)
    for kind, share in shares(span):
        yield kind, x, whole * share
        x += whole * share


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


def amounts(usage: ProgramUsage) -> dict[str, str]:
    kinds = ("cached", "computed", "recomputed", "sampled", "forced", "lost")
    return {kind: f"{count:,}" for kind in kinds if (count := getattr(usage, f"{kind}_tokens"))}


def cached_share(usage: ProgramUsage) -> str:
    return f"{usage.cached_tokens / usage.prompt_tokens:.0%}" if usage.prompt_tokens else ""


def cut(text: str, most: int | None) -> str:
    return text if most is None or len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
