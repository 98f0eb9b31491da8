"""What a program cost, added up over its calls.

Knows: the counters of one call's Usage. Must not know: states, sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.answers import Answer


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


def total(answers: Iterable[Answer]) -> ProgramUsage:
    """Waits for the calls of `answers` and adds them up."""
    answers = list(answers)
    names: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.name is not None:
            names.setdefault(answer.name, []).append(answer)
    return _sum(answers, {name: _sum(own, {}) for name, own in names.items()})


def _sum(answers: list[Answer], by_variable: Mapping[str, ProgramUsage]) -> ProgramUsage:
    finished = [answer for answer in answers if answer.failure() is None]
    done = [answer.call.result().usage for answer in finished]
    forced = sum(usage.forced_tokens for usage in done)
    completion = sum(usage.completion_tokens for usage in done)
    return ProgramUsage(
        calls=len(done),
        failed_calls=len(answers) - len(done),
        prompt_tokens=sum(usage.prompt_tokens for usage in done),
        cached_tokens=sum(usage.cached_tokens for usage in done),
        computed_tokens=sum(usage.computed_tokens for usage in done),
        recomputed_tokens=sum(usage.recomputed_tokens for usage in done),
        completion_tokens=completion,
        sampled_tokens=completion - forced,
        forced_tokens=forced,
        lost_tokens=sum(answer.call.num_tokens for answer in answers if answer.failure() is not None),
        queue_s=sum(usage.queue_s for usage in done),
        wall_s=max((a.ended_s for a in finished), default=0.0) - min((a.began_s for a in finished), default=0.0),
        by_variable=by_variable,
    )
