"""Displays of states, forks and lists of states. Nothing here waits: a call that runs is shown as far as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from plait.lang.core.results import AssignedValue, CallSegment, Samples, Segment, TextSegment, ValueList
from plait.lang.html.render import fragment
from plait.lang.spans.call_progress import ShownToken, progress_of
from plait.runtime.errors import PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.states.base_state import BaseState


MAX_ROWS = 200  # of a table of states


class Part(NamedTuple):
    """`state`: that of the call that generates the text; "known" of other text, "pending" where it is not known yet,
    and "error" if the text says why there is none. `title`: shown on hover. `error`: of the call."""

    state: str
    text: str = ""
    title: str = ""
    error: str = ""
    tokens: Sequence[ShownToken] = ()


class ShownTurn(NamedTuple):
    """`role`: "text" outside of turns. `template`: the chat template's text before it."""

    role: str
    template: str
    parts: list[Part]


class ShownValue(NamedTuple):
    """The value of a variable: its parts, or its items if it is a list."""

    parts: Sequence[Part] = ()
    items: Sequence[ShownValue] | None = None


def state_html(branch: Branch) -> str:
    """Returns a state in turns, with what it cost so far."""
    return fragment("state", branch, _turns_of(branch))


def forks_html(source: Branch, branches: Sequence[Branch], start: int) -> str:
    """Returns the branches of a fork side by side, each from segment `start` on."""
    return fragment("forks", source, [(branch, _turns_of(branch, start)) for branch in branches])


def states_html(states: Sequence[BaseState]) -> str:
    """Returns a table of states, with their variables."""
    branches = [state._branch for state in states[:MAX_ROWS]]
    variables = [branch.variables.copy() for branch in branches]
    names = list(dict.fromkeys(name for own in variables for name in own))
    values = [[_value_of(own[name]) if name in own else ShownValue() for name in names] for own in variables]
    return fragment("states", names, list(zip(branches, values, strict=True)), len(states) - len(branches))


def _value_of(variable: Segment) -> ShownValue:
    if isinstance(variable, ValueList):
        return ShownValue(items=[_value_of(part) for part in variable.parts])
    return ShownValue(list(_parts_of(variable)))


def _turns_of(branch: Branch, start: int = 0) -> list[ShownTurn]:
    """Returns the text of a branch from segment `start` on."""
    segments = list(branch.segments)
    turns = [turn[:3] for turn in branch.turns]
    if branch.open_turn is not None:
        turns.append((*branch.open_turn, len(segments)))
    roles = {at: role for role, first, stop in turns for at in range(first, stop)}
    found, template = list[ShownTurn](), ""
    for role, group in groupby(range(start, len(segments)), lambda at: roles.get(at) or _is_control(segments[at])):
        own = [part for at in group for part in _parts_of(segments[at])]
        if role is True:
            template = "".join(part.text for part in own)
        else:
            found.append(ShownTurn(role or "text", template if role else "", own))
    return found


def _is_control(segment: Segment) -> bool:
    return isinstance(segment, TextSegment) and segment.control


def _parts_of(segment: Segment) -> Iterator[Part]:
    """Yields the parts of a text, as far as they are there."""
    if isinstance(segment, CallSegment):
        now = progress_of(segment)
        title = f"{segment.name or 'gen'}: {now.state}, {segment.call.num_tokens} tokens"
        yield Part(now.state, now.text, title, str(now.error if now.state == "failed" else now.state), now.tokens)
    elif segment.text_parts is not None:
        for part in segment.text_parts:
            yield from _parts_of(part)
        if isinstance(segment, Samples):
            yield Part("known", f" (sample 1 of {len(segment.parts)})")
    elif isinstance(segment, AssignedValue):
        value = segment.value()
        yield Part("known", value if isinstance(value, str) else repr(value))  # str of a state would wait for its text
    elif not all(call.done() for call in segment.calls()):
        yield Part("pending")
    else:
        try:
            yield Part("known", segment.text())
        except PlaitError as error:
            yield Part("error", str(error))
