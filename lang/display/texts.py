"""The text of a state as HTML: its turns, with what the model generated marked, and what is not there yet.

Nothing here waits: a call that still runs is shown as far as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from plait.lang.core.results import CallSegment, Samples, Segment, TextSegment, ValueList
from plait.lang.display.html import box, pre
from plait.lang.spans.call_progress import ShownToken, progress_of
from plait.runtime.errors import PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

MAX_VALUE_CHARS = 2000  # of a value in a table
_STEPS = (0.05, 0.2, 0.5, 0.9)  # bounds of the probabilities that share a colour
_GOING_ON, _PENDING = (f'<span class="pending">{text}</span>' for text in (" …", "pending …"))
PROBABILITIES = (  # a legend
    '<p class="key"><span>probability of a token</span><span><u class="p0">below 5%</u></span>'
    '<span><u class="p1">5 to 20%</u></span><span><u class="p2">20 to 50%</u></span>'
    '<span><u class="p3">50 to 90%</u></span><span><u class="p4">90% and more</u></span></p>'
)


def turns(branch: Branch, start: int = 0) -> str:
    """Returns the text of a branch from segment `start` on. The chat template's text is the title of each role."""
    segments = list(branch.segments)
    open_turn = [] if branch.open_turn is None else [(*branch.open_turn, len(segments))]
    roles = {
        at: role for role, first, stop in [turn[:3] for turn in branch.turns] + open_turn for at in range(first, stop)
    }
    parts: list[str] = []
    control = ""
    for role, group in groupby(range(start, len(segments)), lambda at: roles.get(at, _is_control(segments[at]))):
        own = [segments[at] for at in group]
        if role is True:
            control = "".join(segment.text() for segment in own)
            continue
        label = box("role", escape(role or "text"), title=control if role else "")
        parts.append(box("turn", label, pre("".join(map(segment_html, own)))))
    legend = PROBABILITIES if '<mark class="done tokens"' in (html := "".join(parts)) else ""
    return html + legend or '<p class="soft">no text yet</p>'


def _is_control(segment: Segment) -> bool:
    return isinstance(segment, TextSegment) and segment.control


def segment_html(segment: Segment) -> str:
    """Returns a part of a text, as far as it is there."""
    if isinstance(segment, CallSegment):
        return call_html(segment)
    if segment.text_parts is not None:
        number = f'<span class="soft" title="the first of {len(segment.parts)} samples"> 1/{len(segment.parts)}</span>'
        shown = "".join(map(segment_html, segment.text_parts))
        return shown + number if isinstance(segment, Samples) else shown
    if not all(call.done() for call in segment.calls()):
        return _PENDING
    try:
        return escape(segment.text())
    except PlaitError as error:
        return box("bad", escape(str(error)), tag="span")


def call_html(call_segment: CallSegment) -> str:
    """Returns the text of a call, with what became of it."""
    now, call = progress_of(call_segment), call_segment.call
    title = f"{call_segment.name or 'gen'}: {now.state}, {call.num_tokens} tokens"
    text = tokens_html(now.tokens) or escape(now.text)
    marked = box(f"{now.state}{' tokens' * bool(now.tokens)}", text, tag="mark", title=title)
    if now.state == "done":
        return marked
    if now.state == "running":
        return marked + _GOING_ON if text else _PENDING
    return (marked if text else "") + box(
        "bad", escape(f" [{now.error if now.state == 'failed' else now.state}]"), tag="span"
    )


def tokens_html(tokens: Sequence[ShownToken]) -> str:
    """Returns tokens, coloured by their probabilities."""
    return "".join(
        escape(token.text)
        if token.logprob is None
        else box(f"p{sum(math.exp(token.logprob) >= step for step in _STEPS)}", escape(token.text), tag="u",
                 title=_probabilities(token))
        for token in tokens
    )  # fmt: skip


def _probabilities(token: ShownToken) -> str:
    others = (f"{text!r} {math.exp(logprob):.1%}" for text, logprob in token.others if text != token.text)
    return ", ".join([f"{math.exp(token.logprob or 0.0):.1%}", *others])


def value_html(variable: Segment) -> str:
    """Returns the value of a variable for a table, as far as it is there."""
    if isinstance(variable, ValueList):
        return f"<ol>{''.join(f'<li>{value_html(part)}</li>' for part in variable.parts)}</ol>"
    if isinstance(variable, CallSegment):
        return pre(call_html(variable))
    if not all(call.done() for call in variable.calls()):
        return _PENDING
    try:
        text = variable.text()
    except PlaitError as error:
        return box("bad", escape(str(error)))
    cut = f"… ({len(text):,} characters)" if len(text) > MAX_VALUE_CHARS else ""
    return pre(escape(text[:MAX_VALUE_CHARS] + cut))


def names_in(branches: Iterable[Branch]) -> list[str]:
    """Returns the names of the variables that any of the branches has."""
    return list(dict.fromkeys(name for branch in branches for name in list(branch.variables)))
