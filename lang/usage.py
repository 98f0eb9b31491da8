"""What a program cost, added up over its calls.

Knows: the counters of one call's Usage. Must not know: states, sessions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.answers import Answer


@dataclass(frozen=True)
class ProgramUsage:
    """Tokens of all finished calls of a program, its forks included.

    `prompt_tokens == cached_tokens + computed_tokens`: those found in the prefix cache, and those that went
    through the model. `recomputed_tokens` went through it again, because the pool was full. `failed_calls`
    have no usage and count for nothing else.

    >>> state.usage.cached_tokens / state.usage.prompt_tokens       # doctest: +SKIP
    """

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0


def total(answers: Iterable[Answer]) -> ProgramUsage:
    """Waits for the calls of `answers` and adds them up."""
    answers = list(answers)
    done = [answer.call.result().usage for answer in answers if answer.failure() is None]
    return ProgramUsage(
        calls=len(done),
        failed_calls=len(answers) - len(done),
        prompt_tokens=sum(usage.prompt_tokens for usage in done),
        cached_tokens=sum(usage.cached_tokens for usage in done),
        computed_tokens=sum(usage.computed_tokens for usage in done),
        recomputed_tokens=sum(usage.recomputed_tokens for usage in done),
        completion_tokens=sum(usage.completion_tokens for usage in done),
    )
