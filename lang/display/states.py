"""States, the branches of a fork, and lists of states as HTML. Nothing here waits."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from plait.lang.display.html import box, counted, fragment, key, seconds, state_mark, table
from plait.lang.display.texts import names_in, turns, value_html
from plait.lang.usage import ProgramUsage, total

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.core.run import Run
    from plait.lang.states.base_state import BaseState
    from plait.lang.states.fork_group import ForkGroup

MAX_ROWS = 200  # of a table of states


def state_html(branch: Branch) -> str:
    """Returns the text of a state in turns, and what it cost so far."""
    return fragment(box("card", _head(branch.run), turns(branch)))


def fork_html(group: ForkGroup[Any]) -> str:
    """Returns the branches of a fork side by side, each from the fork on."""
    start, ended = group._fork_point.num_segments, group.src_state._run.ended_branches
    parts = []
    for index, state in enumerate(group.states):
        reason = ended.get(state._branch.branch_id)
        mark = state_mark("cancelled") + box("soft", escape(reason), tag="span") if reason else ""
        head = box("head", f"<b>branch {index}</b>", mark)
        parts.append(box("branch cancelled" if reason else "branch", head, turns(state._branch, start)))
    return fragment(box("card", _head(group.src_state._run), box("branches", *parts)))


def states_html(states: Sequence[BaseState]) -> str:
    """Returns a table of states: their variables and costs, one in each row."""
    shown = [state._branch for state in states[:MAX_ROWS]]
    names, rows = names_in(shown), []
    for number, branch in enumerate(shown):
        usage, variables = _usage_now(branch.run), dict(branch.variables)
        mark = state_mark(branch.run.progress(), str(branch.run.error or ""))
        values = [value_html(variables[name]) if name in variables else "" for name in names]
        counts = [f"{usage.completion_tokens:,}", _cached(usage), seconds(usage.wall_s)]
        rows.append([str(number), mark, *values, *counts])
    head = [("", True), ("state", False), *((name, False) for name in names)]
    shown_table = table([*head, ("tokens", True), ("cached", True), ("time", True)], rows)
    more = f'<p class="soft">and {len(states) - MAX_ROWS:,} more</p>' if len(states) > MAX_ROWS else ""
    return fragment(shown_table, more)


def usage_html(usage: ProgramUsage) -> str:
    """Returns token counts: a legend of all, and a row for each variable."""
    parts = [("<b>all calls</b>", usage), *((escape(name), part) for name, part in usage.by_variable.items())]
    head = ["", "calls", "prompt", "cached", "computed", "generated", "sampled", "forced", "waited", "time"]
    rows = [
        [
            name,
            *(f"{count:,}" for count in (part.calls, part.prompt_tokens, part.cached_tokens, part.computed_tokens)),
            *(f"{count:,}" for count in (part.completion_tokens, part.sampled_tokens, part.forced_tokens)),
            seconds(part.queue_s),
            seconds(part.wall_s),
        ]
        for name, part in parts
    ]
    failed = ""
    if usage.failed_calls:
        lost = f"{counted(usage.failed_calls, 'call')} failed or cancelled, {counted(usage.lost_tokens, 'token')} lost"
        failed = box("soft", lost, tag="p")
    columns = [(title, bool(title)) for title in head]
    return fragment(table(columns, rows), failed)


def _head(run: Run) -> str:
    """Returns the line above a state: its program, what it does, and its tokens by cause."""
    usage = _usage_now(run)
    amounts = {
        "cached": usage.cached_tokens,
        "computed": usage.computed_tokens,
        "sampled": usage.sampled_tokens,
        "forced": usage.forced_tokens,
        "lost": usage.lost_tokens,
    }
    lead = f"{counted(usage.calls, 'call')}, {seconds(usage.wall_s)}" if usage.calls else ""
    head = box("head", f"<b>{escape(run.program)}</b>", state_mark(run.progress()), key(amounts, lead))
    return head + (f'<p class="bad">{escape(str(run.error))}</p>' if run.error is not None else "")


def _usage_now(run: Run) -> ProgramUsage:
    return total(call_segment for call_segment in run.call_segments() if call_segment.ended_s)


def _cached(usage: ProgramUsage) -> str:
    return f"{usage.cached_tokens / usage.prompt_tokens:.0%}" if usage.prompt_tokens else ""
