"""What a program cost, added up over its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.core.results import CallSegment


@dataclass(frozen=True)
class ProgramUsage:
    """Tokens and seconds of all finished calls of a program, its forks included.

    `prompt_tokens == cached_tokens + computed_tokens`: those found in the prefix cache, and those that went
    through the model. `recomputed_tokens` went through it again, because the pool was full.
    `completion_tokens == sampled_tokens + forced_tokens`: a constraint left no choice about the latter.
    `queue_s`: seconds that calls waited to be admitted, added up; `wall_s`: from the first call's beginning to the
    last one's end. `failed_calls` (aborted ones too, as the losers of a race) tell no usage and count for nothing else
    but `lost_tokens`, which they had generated before they ended. `by_variable`: the same for the calls of each
    variable, branches and samples together.

    >>> state.usage.cached_tokens / state.usage.prompt_tokens       # doctest: +SKIP
    >>> state.usage.by_variable["answer"].sampled_tokens            # doctest: +SKIP
    """

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    lost_tokens: int = 0
    queue_s: float = 0.0
    wall_s: float = 0.0
    by_variable: Mapping[str, ProgramUsage] = field(default_factory=dict)


def total(call_segments: Iterable[CallSegment]) -> ProgramUsage:
    """Waits for the calls of `call_segments` and adds them up."""
    call_segments = list(call_segments)
    names: dict[str, list[CallSegment]] = {}
    for call_segment in call_segments:
        if call_segment.name is not None:
            names.setdefault(call_segment.name, []).append(call_segment)
    return _sum(call_segments, {name: _sum(own, {}) for name, own in names.items()})


def _sum(call_segments: list[CallSegment], by_variable: Mapping[str, ProgramUsage]) -> ProgramUsage:
    finished = [call_segment for call_segment in call_segments if call_segment.failure() is None]
    done = [call_segment.call.result().usage for call_segment in finished]
    forced = sum(usage.forced_tokens for usage in done)
    completion = sum(usage.completion_tokens for usage in done)
    return ProgramUsage(
        calls=len(done),
        failed_calls=len(call_segments) - len(done),
        prompt_tokens=sum(usage.prompt_tokens for usage in done),
        cached_tokens=sum(usage.cached_tokens for usage in done),
        computed_tokens=sum(usage.computed_tokens for usage in done),
        recomputed_tokens=sum(usage.recomputed_tokens for usage in done),
        completion_tokens=completion,
        sampled_tokens=completion - forced,
        forced_tokens=forced,
        lost_tokens=sum(
            call_segment.call.num_tokens for call_segment in call_segments if call_segment.failure() is not None
        ),
        queue_s=sum(usage.queue_s for usage in done),
        wall_s=max((a.ended_s for a in finished), default=0.0) - min((a.began_s for a in finished), default=0.0),
        by_variable=by_variable,
    )
