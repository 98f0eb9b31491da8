"""The texts of states in parts, for the displays. Nothing here waits: a call that runs is there as far as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.lang.core.results import CallSegment, Samples, Segment, TextSegment, ValueList
from plait.lang.spans.call_progress import ShownToken, progress_of
from plait.runtime.errors import PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.usage import ProgramUsage


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


def turns_of(branch: Branch, start: int = 0) -> list[ShownTurn]:
    """Returns the text of a branch from segment `start` on."""
    segments = list(branch.segments)
    turns = [turn[:3] for turn in branch.turns]
    if branch.open_turn is not None:
        turns.append((*branch.open_turn, len(segments)))
    roles = {at: role for role, first, stop in turns for at in range(first, stop)}
    found, template = list[ShownTurn](), ""
    for role, group in groupby(range(start, len(segments)), lambda at: roles.get(at) or _is_control(segments[at])):
        own = [part for at in group for part in parts_of(segments[at])]
        if role is True:
            template = "".join(part.text for part in own)
        else:
            found.append(ShownTurn(role or "text", template if role else "", own))
    return found


def _is_control(segment: Segment) -> bool:
    return isinstance(segment, TextSegment) and segment.control


def parts_of(segment: Segment) -> Iterator[Part]:
    """Yields the parts of a text, as far as they are there."""
    if isinstance(segment, CallSegment):
        now = progress_of(segment)
        title = f"{segment.name or 'gen'}: {now.state}, {segment.call.num_tokens} tokens"
        yield Part(now.state, now.text, title, str(now.error if now.state == "failed" else now.state), now.tokens)
    elif segment.text_parts is not None:
        for part in segment.text_parts:
            yield from parts_of(part)
        if isinstance(segment, Samples):
            yield Part("known", f" (sample 1 of {len(segment.parts)})")
    elif not all(call.done() for call in segment.calls()):
        yield Part("pending")
    else:
        try:
            yield Part("known", segment.text())
        except PlaitError as error:
            yield Part("error", str(error))


def items_of(variable: Segment) -> Sequence[Segment] | None:
    return variable.parts if isinstance(variable, ValueList) else None


def names_in(states: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name for state in states for name in list(state._branch.variables)))


def amounts(usage: ProgramUsage) -> dict[str, str]:
    kinds = ("cached", "computed", "recomputed", "sampled", "forced", "lost")
    return {kind: f"{count:,}" for kind in kinds if (count := getattr(usage, f"{kind}_tokens"))}


def cached_share(usage: ProgramUsage) -> str:
    return f"{usage.cached_tokens / usage.prompt_tokens:.0%}" if usage.prompt_tokens else ""


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
